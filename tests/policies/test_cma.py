"""Tuning options of heuristics: `train.py --algo cma`, `python -m policies tune`, and what it wrote for the project."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from envs.spec import load_cluster
from policies import ADMISSIONS, ROUTERS, PolicyError, make_policy
from policies.__main__ import app
from policies.registry import parse_heuristic
from policies.tuned import capacity, pairs, tuned
from policies.tuning import WARMUP, Search, Space, Trials, Window
from tests.training import error_of
from traces import builtin
from train import main

ROOT = Path(__file__).parents[2]
SMALL = ["--algo=cma", "--cluster=2p2d", "--episode-requests=200", "--windows=3", "--population=4", "--load=5,8"]


def run(out: Path, *more: str) -> dict:
    assert main([*SMALL, "--out", str(out), *more]) == 0
    return json.loads((out / "metrics.json").read_text())


def options_of(name: str) -> list[tuple]:
    """(option, its value) of all that is searched in a policy's name."""
    parts = parse_heuristic(name)
    assert parts is not None
    router, admission, *given = parts
    return [
        (option, values[option.name])
        for part, values in zip((ROUTERS[router], ADMISSIONS[admission]), given, strict=True)
        for option in part.options
        if option.low is not None and option.name in values
    ]


def test_every_option_is_searched_from_its_default_within_its_range() -> None:
    rng = np.random.default_rng(0)
    searched = set()
    for router in ROUTERS:
        for admission in ADMISSIONS:
            base = f"{router}+{admission}"
            if not ROUTERS[router].options and not ADMISSIONS[admission].options:
                with pytest.raises(PolicyError, match="nothing to tune"):
                    Space(base)
                continue
            space = Space(base)
            for option, value in options_of(space.policy(space.start)):
                assert value == pytest.approx(option.default, rel=5e-4)
            n = len(space.start)
            for point in (np.zeros(n), np.ones(n), *rng.uniform(size=(20, n))):
                name = space.policy(point)
                make_policy(name)
                for option, value in options_of(name):
                    searched.add((router, admission, option.name))
                    assert option.low <= value <= option.high, name
                    assert option.scale != "switch" or value in (option.low, option.high)
    assert ("conductor", "slo", "min_over_both") in searched
    assert ("dynamo", "none", "block_tokens") not in searched


def test_options_in_a_name_are_kept_or_where_the_search_starts() -> None:
    space = Space("dynamo:block_tokens=256,tokens_per_s=5000+slo:threshold=9")
    start = space.policy(space.start)
    assert start.startswith("dynamo:block_tokens=256,tokens_per_s=5000,device_credit=1,host_credit=0.75+")
    assert start.endswith("+slo:threshold=1.5")  # 9 is out of its range
    make_policy("dynamo+slo:threshold=9")


def test_search_finds_a_planted_optimum() -> None:
    def value(name: str) -> float:
        """Highest, 1, at threshold 0.7; the router's options matter little."""
        values = {option.name: number for option, number in options_of(name)}
        return 1 - (values["threshold"] - 0.7) ** 2 - 1e-3 * values.get("beta", 0.0)

    for base in ("cache_aware+slo", "production_stack+slo"):
        search = Search(Space(base), seed=0)
        for _ in range(30):
            search.tell([value(name) for name in search.ask()])
        assert value(search.mean()) > 0.995, search.mean()


def test_a_bad_start_gets_better_where_it_is_tuned_and_no_worse_on_validation(tmp_path: Path) -> None:
    base = "cache_aware+slo:threshold=0.25"
    metrics = run(tmp_path / "run", "--base", base, "--generations", "8", "--windows", "6")
    assert metrics["best"]["goodput"] > metrics["validation"][0]["goodput"] + 0.02
    name = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["policy"]
    assert make_policy(str(tmp_path / "run")).name == name == metrics["best"]["policy"]
    trials = Trials(load_cluster("2p2d"), [builtin("conversation")], [(5.0, 8.0)], requests=200)
    before, after = trials.goodput([base, name], trials.training(20, (7,)))
    assert after > before
    assert trials.goodput([name], trials.validation())[0] == metrics["best"]["goodput"]


def test_a_policy_that_nothing_beats_stays_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trials, "goodput", lambda self, policies, windows: np.full(len(policies), 0.5))
    run(tmp_path / "run", "--base", "conductor+slo", "--generations", "2")
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["policy"] == "conductor+slo"


def test_goodput_is_that_of_the_leaderboard() -> None:
    from leaderboard import make_part, make_setting, replay_compiled

    trace = builtin("conversation")
    trials = Trials(load_cluster("2p2d"), [trace], [(4.0, 4.0)])
    window = trials.validation()[0]
    assert window.jitter == 0
    setting = make_setting(trace, make_part(trace, "validation", WARMUP, 1, "builtin:conversation"), "2p2d")
    for name in ("random+early", "conductor+slo:threshold=0.8"):
        assert trials.goodput([name], [window])[0] == replay_compiled(make_policy(name), setting, 4.0, 0).good.mean()


def test_same_seed_same_run_and_resumed_equals_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(metrics: dict) -> dict:
        return {name: metrics[name] for name in ("best", "history", "validation")}

    whole = run(tmp_path / "whole", "--generations", "7")
    other = run(tmp_path / "other", "--generations", "7", "--seed", "1")
    assert whole["history"] != other["history"]

    original = Trials.training

    def interrupted(self: Trials, count: int, seed: tuple[int, int]) -> list:
        if seed[1] == 4:
            raise KeyboardInterrupt
        return original(self, count, seed)

    out = tmp_path / "stopped"
    with monkeypatch.context() as patched:
        patched.setattr(Trials, "training", interrupted)
        assert main([*SMALL, "--out", str(out), "--generations", "7"]) == 130
    assert capsys.readouterr().err.strip().endswith(f"python train.py --resume {out}")
    assert json.loads((out / "metrics.json").read_text())["generations"] == 3
    for flag, value in (("--base", "cache_aware+slo"), ("--seed", "3"), ("--population", "5")):
        assert f"{flag} {value}: the run in" in error_of(["--resume", str(out), flag, value], capsys)
    assert main(["--resume", str(out)]) == 0
    assert told(json.loads((out / "metrics.json").read_text())) == told(whole)
    assert "has 7 generations already" in error_of(["--resume", str(out)], capsys)
    assert (
        yaml.safe_load((out / "config.yaml").read_text())["policy"]
        == yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())["policy"]
        == whole["best"]["policy"]
    )
    (out / "metrics.json").write_text('{"history": 3}')
    assert "expected the metrics of a run" in error_of(["--resume", str(out), "--generations", "9"], capsys)


def test_ctrl_c_leaves_a_policy_that_loads_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "train.py", *SMALL, "--generations", "1000000", "--out", str(out)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + 300
    while not (out / "metrics.json").is_file() and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip().splitlines()[-1].endswith(f"python train.py --resume {out}")
    assert "Traceback" not in errors
    make_policy(str(out))
    done = json.loads((out / "metrics.json").read_text())["generations"]
    assert done > 0
    assert main(["--resume", str(out), "--generations", str(done + 1)]) == 0


def test_several_traces(tmp_path: Path) -> None:
    metrics = run(tmp_path / "run", "--trace", "builtin:conversation,builtin:synthetic", "--generations", "2")
    assert metrics["generations"] == 2
    trained_on = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trained_on"]
    assert len(trained_on["traces"]) == 2


def test_tensorboard_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = run(tmp_path / "run", "--generations", "3")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    goodput = [event.value for event in events.Scalars("train/goodput")]
    assert goodput == pytest.approx([np.mean(entry["candidates"]) for entry in metrics["history"]])
    assert {"train/sigma", "validation/goodput"} <= set(events.Tags()["scalars"])


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for base, match in (
        ("runs/mine", "'runs/mine' cannot be tuned: expected ROUTER[+ADMISSION]"),
        ("conductor:nope=1", "has no option 'nope'"),
        ("conductor+nope", "no admission is called 'nope'"),
        ("conductor+slo:threshold=high", "expected option=number"),
        ("round_robin", "'round_robin' has nothing to tune"),
    ):
        assert match in error_of([*SMALL, "--base", base, "--out", str(out)], capsys)
    assert "--population 3" in error_of([*SMALL, "--population", "3"], capsys)
    assert "--generations 0" in error_of([*SMALL, "--generations", "0"], capsys)
    assert "--windows -1" in error_of([*SMALL, "--windows", "-1"], capsys)
    assert not out.exists()


NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "stable_baselines3", "sb3_contrib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def test_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_TORCH)
    command = [sys.executable, "train.py", *SMALL, "--generations", "1", "--out", str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def tune_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_tune_writes_the_best_pair_of_each_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.tuned.FIRST_GENERATIONS", 1)
    monkeypatch.setattr("policies.tuned.MORE_GENERATIONS", 1)
    given = ["--trace", "builtin:synthetic", "--cluster", "2p2d", "--capacity", "1.0,2.5"]
    given += ["--only", "random+slo,llmd_latency+early,random+early"]
    stored = []
    for name in "ab":
        out = tmp_path / f"{name}.yaml"
        done = tune_command(*given, "--out", str(out))
        assert done.exit_code == 0, done.output
        command, *_ = out.read_text().splitlines()
        assert command == f"# python -m policies tune {' '.join(given)} --seed 0 --out {out}"
        stored.append(yaml.safe_load(out.read_text()))
    assert stored[0] | {"command": ""} == stored[1] | {"command": ""}
    policies = stored[0]["policies"]
    assert len(policies) == 2 and "llmd_latency+early" in policies
    ((low, high),) = stored[0]["trained_on"]["loads"].values()
    assert high == pytest.approx(2.5 * low, rel=1e-3)
    trials = Trials(load_cluster("2p2d"), [builtin("synthetic")], [(low, high)])
    for plain, entry in policies.items():
        found = trials.goodput([plain, entry["policy"]], trials.validation())
        assert found == pytest.approx([entry["default"], entry["validation"]], abs=1e-4)
        assert entry["validation"] >= entry["default"]


def test_capacity_is_where_conductor_meets_the_target() -> None:
    spec, trace = load_cluster("2p2d"), builtin("conversation")
    load = capacity(spec, trace)
    trials = Trials(spec, [trace], [(1.0, 1.0)], requests=trace.n_requests)
    length = trace.split().train.n_requests
    good = [trials.goodput(["conductor"], [Window(0, 0, length, load * by, 0)])[0] for by in (1.0, 1.05)]
    assert good[0] >= 0.9 > good[1]


def test_tune_refusals(tmp_path: Path) -> None:
    given = ["--trace", "builtin:synthetic", "--out", str(tmp_path / "out.yaml")]
    for more, match in (
        ([], "expected one of --load"),
        (["--load", "1,2", "--capacity", "1,2"], "expected one of --load"),
        (["--load", "2,1"], "expected LOW,HIGH"),
        (["--load", "1"], "expected LOW,HIGH"),
        (["--load", "1,2", "--only", "nope"], "'nope' cannot be tuned"),
        (["--load", "1,2", "--only", "random+none"], "nothing to tune"),
        (["--load", "1,2", "--cluster", "nope"], "no cluster is called"),
        (["--load", "1,2", "--trace", "nope.jsonl"], "no such file"),
        (["--load", "1,2", "--out", str(tmp_path)], "cannot be written"),
    ):
        refused = tune_command(*given, *more)
        assert refused.exit_code == 2
        assert match in refused.output and refused.output.count("\n") == 1, refused.output
    assert not any(tmp_path.iterdir())


def test_every_router_is_tuned_with_every_admission_that_leaves_something_to_tune() -> None:
    found = pairs()
    assert list(found) == [router for router in ROUTERS if router != "prior"]
    without = sum(not router.options for router in ROUTERS.values())
    assert sum(map(len, found.values())) == len(found) * (len(ADMISSIONS) - 1) - without
    assert pairs(["llmd", "conductor+slo"])["conductor"] == ["conductor+slo"]


def test_the_tuned_policies_of_the_project() -> None:
    stored = yaml.safe_load((ROOT / "policies" / "tuned.yaml").read_text())
    assert {plain.partition("+")[0] for plain in tuned()} == set(ROUTERS) - {"prior"}
    for plain, name in tuned().items():
        make_policy(name)
        router, admission, *_ = parse_heuristic(name) or ("", "")
        assert plain == f"{router}+{admission}"
        for option, value in options_of(name):
            assert option.low <= value <= option.high, name
        assert stored["policies"][plain]["validation"] >= stored["policies"][plain]["default"]
    assert not re.search(r"(^|[ ,])/", stored["command"])  # no path of a machine


def test_help_mentions_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "--algo cma --base" in shown
    assert "tune" in CliRunner().invoke(app, ["--help"]).output
