"""Exported policies: the same decisions without torch, the same bytes twice, and refusals that say why."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import traces
from envs.simulator import Simulator, empty_observation
from envs.spec import load_cluster
from envs.state import Observation
from leaderboard import main as leaderboard
from leaderboard import read_only
from policies import PolicyError, make_policy
from policies.artifact import (
    KEY,
    OnnxPolicy,
    check_same,
    export_run,
    load_artifact,
    read_metadata,
    to_onnx,
)
from policies.networks import MASKED, SetScorer
from policies.run_folder import action_masks, float32_tables, load_weights, observation_schema
from policies.trainers.workload import Workload
from tests.torch_policy import NetworkPolicy
from train import Options, parse_range, write_config

ROOT = Path(__file__).parents[2]
SMALL = Options(
    cluster="2p2d", steps=256, envs=4, episode_requests=100, n_steps=32, minibatch=64, hidden=8, group=2,
    eval_requests=200, checkpoint_every=128, device="cpu",
)  # fmt: skip


_made: dict[str, Path] = {}  # for this file and for test_export_cli.py


def trained(factory: pytest.TempPathFactory) -> Path:
    """A run of few steps, trained for real, once for all tests."""
    from policies.trainers import ppo

    if "run" not in _made:
        folder = factory.mktemp("trained") / "run"
        for part in ("checkpoints", "tensorboard"):
            (folder / part).mkdir(parents=True)
        spec, trace = load_cluster(SMALL.cluster), traces.load(SMALL.trace).rows(0, 3000)
        workloads = [Workload(trace, SMALL.part, parse_range("load", SMALL.load))]
        write_config(SMALL, folder, spec, workloads)
        assert ppo.train(SMALL, folder, spec, workloads, False)
        _made["run"] = folder
    return _made["run"]


def exported(factory: pytest.TempPathFactory) -> Path:
    """That run, exported, which takes most of the time here."""
    if "file" not in _made:
        file = factory.mktemp("exported") / "policy.onnx"
        export_run(trained(factory), file)
        _made["file"] = file
    return _made["file"]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory)


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory)


def in_torch(run: Path) -> NetworkPolicy:
    """The network of a run itself: what is loaded from its folder by name is compiled, with a rounding of its own."""
    return NetworkPolicy(load_weights(run / "best.zip", {"hidden": SMALL.hidden, "anchored": False}), str(run), True)


def simulator_of(cluster: str, requests: int, clusters: int = 1, speed: float = 1.0) -> Simulator:
    trace = traces.load(SMALL.trace).rows(0, requests)
    simulator = Simulator.for_trace(load_cluster(cluster), trace, clusters=clusters)
    for c in range(clusters):
        simulator.load(c, trace, speed=speed * (1 + c))
        simulator.begin(c)
        simulator.observe(c)
    return simulator


# --- decisions -----------------------------------------------------------------------------------


def same(actions: np.ndarray, theirs: NetworkPolicy, observation: Observation) -> np.ndarray:
    """Where actions are torch's. Elsewhere they must be as good: instances that are alike tie, but for rounding."""
    tables = {name: torch.from_numpy(table) for name, table in float32_tables(observation).items()}
    with torch.inference_mode():
        logits = theirs.scorer(tables, torch.from_numpy(action_masks(observation))).numpy()
    assert (logits[np.arange(len(actions)), actions] >= logits.max(1) - 1e-4).all()
    equal: np.ndarray = actions == theirs.decide(observation)
    return equal


@pytest.mark.parametrize(
    ("cluster", "speed"), [("1p1d", 0.3), ("2p2d", 1.0), ("3p5d", 1.5), ("8p8d", 2.0), ("20p7d", 5.0)]
)
def test_decides_as_torch_does_in_any_pool(run: Path, file: Path, cluster: str, speed: float) -> None:
    ours, theirs = make_policy(str(file)), in_torch(run)
    assert isinstance(ours, OnnxPolicy)
    assert (ours.name, ours.recheck) == (str(file), theirs.recheck)
    ours.reset(1, 0)
    simulator = simulator_of(cluster, 400, speed=speed)
    observation, done = read_only(simulator.observation_tables), np.zeros(1, np.bool_)
    decided, equal = [], 0
    while not done[0]:
        actions = ours.decide(observation)
        assert actions.dtype == np.int64
        equal += int(same(actions, theirs, observation)[0])
        decided.append(int(actions[0]))
        simulator.step(actions, done)
    assert len(decided) == 400
    assert len(set(decided)) > 1
    assert equal >= 395


def test_decides_for_many_clusters_as_for_each(run: Path, file: Path) -> None:
    ours, theirs = make_policy(str(file)), in_torch(run)
    simulator = simulator_of("3p2d", 150, clusters=4)
    observation, done = simulator.observation_tables, np.zeros(4, np.bool_)
    rng = np.random.default_rng(0)
    equal = 0
    for step in range(150):
        if step == 70:
            simulator.batch.state.prefill["up"][1, 0] = 0
            simulator.batch.state.decode["up"][2, :] = 0
        actions = ours.decide(observation)
        alone = [ours.decide(Observation(*(table[c : c + 1] for table in observation)))[0] for c in range(4)]
        equal += int(same(actions, theirs, observation).sum())
        same(np.array(alone), theirs, observation)
        masks = action_masks(observation)
        assert masks[np.arange(4), actions].all()
        assert step <= 70 or actions[2] == 0
        simulator.step(np.array([rng.choice(np.flatnonzero(row)) for row in masks]), done)
    assert equal > 590


def test_sees_what_changed_in_the_same_tables(file: Path, run: Path) -> None:
    """Also in tables that are not in one piece, and after other shapes have been there."""
    ours, theirs = load_artifact(file), in_torch(run)
    whole = simulator_of("2p2d", 50, clusters=4).observation_tables
    every_other = Observation(*(table[::2] for table in whole))
    for _ in range(3):
        for observation in (whole, every_other):
            assert ours.decide(observation).tolist() == theirs.decide(observation).tolist()
        for p in range(1, 8):
            assert ours.decide(empty_observation(1, p, 1)).tolist() == [0]
        whole.prefill["ttft_local_s"] *= 10.0
        whole.prefill_mask[:, 0] = 0
    assert ours.decide(every_other).tolist() == [0, 0]


def test_logits_and_scores(file: Path) -> None:
    ours = load_artifact(file)
    observation = simulator_of("3p2d", 20, clusters=3, speed=20.0).observation_tables
    masks = action_masks(observation)
    logits, scores = ours.logits(observation), ours.scores(observation)
    assert logits.shape == scores.shape == masks.shape
    assert (logits[~masks] == np.float32(MASKED)).all()
    assert (scores[~masks] == 0).all() and (scores[masks] >= 0).all()
    np.testing.assert_allclose(scores.sum(1), 1.0)
    expected = torch.softmax(torch.from_numpy(logits.astype(float)), 1)
    np.testing.assert_allclose(scores, expected, atol=1e-12)
    assert scores.argmax(1).tolist() == ours.decide(observation).tolist()
    kept = logits.copy()
    ours.decide(empty_observation(3, 3, 2))
    np.testing.assert_array_equal(logits, kept)


def test_nan_in_an_observation_counts_as_nothing(file: Path, run: Path) -> None:
    ours, theirs = load_artifact(file), in_torch(run)
    observation = simulator_of("3p2d", 50, clusters=2).observation_tables
    observation.prefill["fetch_s"][0, 1] = np.nan
    observation.prefill["ttft_local_s"][1, 0] = np.inf
    observation.cluster["arrival_rate"][1] = -np.inf
    assert ours.decide(observation).tolist() == theirs.decide(observation).tolist()
    for table in observation[:4]:
        for name in table.dtype.names or ():
            table[name] = np.nan
    assert ours.decide(observation).tolist() == theirs.decide(observation).tolist()


def test_a_table_of_another_kind_is_refused(file: Path) -> None:
    observation = empty_observation(1, 2, 2)
    other = observation._replace(decode=np.zeros((1, 2), [("batch", "f8")]))
    with pytest.raises(PolicyError, match="table 'decode'"):
        load_artifact(file).decide(other)


# --- the file ------------------------------------------------------------------------------------


def test_the_same_scorer_gives_the_same_bytes(file: Path, run: Path) -> None:
    about = {key: value for key, value in read_metadata(file).items() if key != "graph_sha256"}
    again = to_onnx(load_weights(run / "best.zip", {"hidden": SMALL.hidden, "anchored": False}), about)
    assert again == file.read_bytes()
    for word in (str(ROOT), str(Path.home()), "networks.py", "site-packages"):
        assert word.encode() not in again


def test_metadata(file: Path, run: Path) -> None:
    about = read_metadata(file)
    assert about["format"] == 1
    assert about["name"] == "run"
    assert about["network"] == {"kind": "set-scorer/2", "hidden": 8, "anchored": False}
    assert about["observation"] == observation_schema()
    assert about["recheck"] is True
    assert about["normalisation"]["prefill"][0] == ["queue_s", "ttft_slo_s"]
    training = about["training"]
    metrics = json.loads((run / "metrics.json").read_text())
    assert training["seed"] == 0
    assert training["checkpoint"] == "best.zip"
    assert training["steps"] == metrics["best"]["steps"]
    assert training["validation"]["goodput"] == metrics["best"]["goodput"]
    assert training["command"].startswith("python train.py --algo ppo --trace builtin:conversation --cluster 2p2d")
    from train import parse

    assert parse(training["command"].split()[2:]) == SMALL
    assert about["versions"]["training"]["torch"] == about["versions"]["export"]["torch"]
    onnx.checker.check_model(onnx.load(file))


def test_an_export_that_decides_otherwise_is_refused(file: Path) -> None:
    other = SetScorer(8).eval()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with pytest.raises(PolicyError, match=r"disagree on observations of 1 prefill.*nothing written"):
        check_same(other, file.read_bytes(), read_metadata(file))


def test_a_scorer_that_is_nan_is_refused(file: Path) -> None:
    other = SetScorer(8).eval()
    torch.nn.init.constant_(other.pool.bias, float("nan"))
    with pytest.raises(PolicyError, match="disagree"):
        check_same(other, file.read_bytes(), read_metadata(file))


def test_runs_without_torch(file: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'stable_baselines3', 'sb3_contrib', 'onnx', 'onnxscript'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    program = (
        "import sys; from policies import make_policy; from envs.simulator import empty_observation\n"
        "print(make_policy(sys.argv[1]).decide(empty_observation(2, 3, 4)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, str(file)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == "[0 0]\n"
    assert shown.stderr == ""


def test_leaderboard_takes_the_file(file: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ["--policies", f"{file},conductor", "--cluster", "2p2d", "--trace", "builtin:synthetic"]
    assert leaderboard([*arguments, "--seeds", "1", "--json", str(result)]) in (None, 0)
    assert {row["policy"] for row in json.loads(result.read_text())["rows"]} == {str(file), "conductor"}


# --- refusals ------------------------------------------------------------------------------------


def changed(
    file: Path,
    to: Path,
    about: Callable[[dict[str, Any]], Any] | None = None,
    graph: Callable[[Any], Any] | None = None,
) -> Path:
    """A copy whose metadata or model was changed, its digest made right again."""
    model = onnx.load(file)
    if graph:
        graph(model)
    said = json.loads(next(entry.value for entry in model.metadata_props if entry.key == KEY))
    said["graph_sha256"] = hashlib.sha256(model.graph.SerializeToString(deterministic=True)).hexdigest()
    if about:
        about(said)
    helper.set_model_props(model, {KEY: json.dumps(said)})
    to.write_bytes(model.SerializeToString(deterministic=True))
    return to


def test_another_observation_is_refused_with_the_columns(file: Path, tmp_path: Path) -> None:
    schema = observation_schema()
    other = schema | {"decode": ["gpu_temperature", *schema["decode"][1:]], "sha256": "0"}
    copy = changed(file, tmp_path / "a.onnx", lambda about: about.update(observation=other))
    with pytest.raises(
        PolicyError, match=r"a\.onnx: .*'decode': it reads gpu_temperature, which is gone; batch is new"
    ):
        make_policy(str(copy))
    assert read_metadata(copy)["observation"] == other  # but can be looked into


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, r"of format 2, newer than 1, .* upgrade conductor-gym"),
        ({"format": "x"}, "of format 'x'"),
        ({"recheck": "yes"}, r"must have 'recheck' \(bool\), found 'yes'"),
        ({"observation": None}, "'observation' must name request"),
        ({"graph_sha256": "0"}, "not the one that was exported"),
    ],
)
def test_metadata_that_cannot_be(file: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    copy = changed(file, tmp_path / "a.onnx", lambda about: about.update(change))
    with pytest.raises(PolicyError, match=rf"a\.onnx: .*{message}"):
        load_artifact(copy)


def test_what_is_no_policy(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "a.onnx"
    with pytest.raises(PolicyError, match=r"a\.onnx: no such file"):
        make_policy(str(other))
    whole = file.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        other.write_bytes(whole[:length])
        with pytest.raises(PolicyError, match=r"a\.onnx: not an ONNX file"):
            make_policy(str(other))
    rng = np.random.default_rng(0)
    for text in (b"hello, world\n", b"PK\x03\x04" * 50, rng.bytes(2000), b"{}"):
        other.write_bytes(text)
        with pytest.raises(PolicyError, match=r"a\.onnx: not an ONNX file"):
            make_policy(str(other))
    refused = 0
    for at in rng.integers(len(whole), size=50):
        flipped = bytearray(whole)
        flipped[at] ^= 255
        other.write_bytes(bytes(flipped))
        try:
            make_policy(str(other))
        except PolicyError as error:
            refused += str(error).startswith(f"{other}: ")
    assert refused > 40  # what is left is text that nothing depends on
    plain = onnx.load(file)
    del plain.metadata_props[:]
    other.write_bytes(plain.SerializeToString())
    with pytest.raises(PolicyError, match=r"an ONNX file, but no policy: expected one made by `python -m policies"):
        make_policy(str(other))
    other.unlink()
    other.symlink_to(tmp_path)
    with pytest.raises(PolicyError, match=r"a\.onnx"):
        load_artifact(other)


def add_node(operator: str, domain: str = "", **attributes: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        inputs = [] if operator == "Constant" else ["logits"]
        node = helper.make_node(operator, inputs, ["more"], domain=domain, **attributes)
        if domain:
            model.opset_import.append(helper.make_opsetid(domain, 1))
        model.graph.node.append(node)

    return change


def external(where: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1])
        tensor.data_location = TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", "/etc/passwd"
        if where == "initializer":
            model.graph.initializer.append(tensor)
        else:
            add_node("Constant", value=tensor)(model)

    return change


def add_function(model: Any) -> None:
    model.functions.append(helper.make_function("mine", "f", ["x"], ["x"], [], [helper.make_opsetid("", 20)]))


def branch(model: Any) -> None:
    empty = helper.make_graph([], "g", [], [])
    model.graph.node.append(helper.make_node("If", ["mask"], ["more"], then_branch=empty, else_branch=empty))


def rename_input(model: Any) -> None:
    for node in model.graph.node:
        node.input[:] = ["tables" if name == "request" else name for name in node.input]
    model.graph.input[0].name = "tables"


def cut_weight(model: Any) -> None:
    """A weight of another shape than its users expect."""
    weight = next(w for w in model.graph.initializer if list(w.dims) == [8, 8])
    weight.CopyFrom(onnx.numpy_helper.from_array(np.ones((7, 7), np.float32), weight.name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_node("Evil", "third.party"), r"operator 'third\.party\.Evil', and a policy is arithmetic only"),
        (add_node("RandomNormalLike"), "operator 'RandomNormalLike'"),
        (branch, "operator 'If'"),
        (external("initializer"), "refers to weights in another file"),
        (external("constant"), "refers to weights in another file"),
        (add_function, "functions of its own"),
        (rename_input, "expected the inputs request, prefill, decode, cluster, mask"),
        (cut_weight, "ONNX Runtime (refuses it|failed)"),
        (lambda model: model.graph.ClearField("node"), "ONNX Runtime refuses it"),
    ],
)
def test_graphs_that_are_no_policy(file: Path, tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    copy = changed(file, tmp_path / "a.onnx", graph=change)
    with pytest.raises(PolicyError, match=rf"a\.onnx: .*{message}") as refused:
        load_artifact(copy)
    assert "\n" not in str(refused.value)


def test_logits_that_are_not_finite_are_an_error(file: Path, tmp_path: Path) -> None:
    def spoil(model: Any) -> None:
        for weight in model.graph.initializer:
            values = onnx.numpy_helper.to_array(weight)
            if values.shape == (3,) and values.dtype == np.float32:
                weight.CopyFrom(onnx.numpy_helper.from_array(np.full_like(values, np.nan), weight.name))

    policy = load_artifact(changed(file, tmp_path / "a.onnx", graph=spoil))
    for clusters in (1, 2):
        observation = simulator_of("2p2d", 20, clusters).observation_tables
        with pytest.raises(PolicyError, match=r"a\.onnx: .*not finite \(NaN"):
            policy.decide(observation)
        with pytest.raises(PolicyError, match=r"a\.onnx: .*not finite \(NaN"):
            policy.scores(observation)
        assert np.isnan(policy.logits(observation)).any()
        observation.decode_mask[:] = 0
        assert policy.decide(observation).tolist() == [0] * clusters


def test_missing_onnxruntime_says_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(PolicyError, match=r"needs onnxruntime: pip install 'conductor-gym\[serve\]'"):
        make_policy(str(file))
    assert read_metadata(file)["name"] == "run"


def test_missing_onnx_says_what_to_install(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(PolicyError, match=r"needs onnxscript: pip install 'conductor-gym\[train,export\]'"):
        export_run(run, tmp_path / "a.onnx")
