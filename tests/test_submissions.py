"""Submissions: what is refused unread, what a sandboxed process can and cannot do, and what the board says of it."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leaderboard
from envs.simulator import empty_observation
from envs.state import Observation
from leaderboard_rerun import differences
from policies.registry import LEARNED
from submissions import isolated, sandbox
from submissions.folder import METADATA, SubmissionError, holds_pickle, printable, read_submission
from submissions.isolated import Account, Disqualified, IsolatedPolicy, Limits, NoSandbox, Twins
from tests.test_leaderboard_site import read as read_site
from tests.test_leaderboard_site import simulated
from traces import builtin, save

pytestmark = pytest.mark.skipif(sandbox.why_not() is not None, reason=f"no sandbox here: {sandbox.why_not()}")

PAGE = (Path(__file__).parents[1] / "docs" / "submissions.md").read_text()
EXAMPLE, GOOD = (
    re.search(rf'^```\w+ title="inbox/greedy/{name}"\n(.*?)^```', PAGE, re.M | re.S)[1]  # type: ignore[index]
    for name in ("submission.yaml", "greedy.py")
)
"""The page's example: its metadata and its code."""
REJECTS = """import numpy as np
{top}
class P:
    def decide(self, o):
{body}
        return np.zeros(len(o.request), np.int64)
"""
QUICK = Limits(start_s=30, decision_s=10, total_s=300, memory_gib=0.5)


def submit(folder: Path, code: str = GOOD, policy: str = "greedy.py:Greedy", **fields: Any) -> Path:
    """A folder with a submission."""
    folder.mkdir(parents=True)
    about = {"name": folder.name, "author": "somebody", "description": "It does.", "policy": policy} | fields
    (folder / METADATA).write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in about.items()))
    if ":" in policy:
        (folder / policy.partition(":")[0]).write_text(code)
    return folder


def does(folder: Path, body: str = "pass", top: str = "") -> Path:
    """A submission that does something and then rejects."""
    indented = "\n".join(f"        {line}" for line in body.splitlines())
    return submit(folder, REJECTS.format(top=top, body=indented), "p.py:P")


def seen(clusters: int = 2, prefills: int = 2, decodes: int = 2) -> Observation:
    """An observation in which everything is allowed but fetching, and the last decode instance."""
    observation = empty_observation(clusters, prefills, decodes)
    observation.prefill_mask[:, :, [0, 2]] = 1
    observation.decode_mask[:, :-1] = 1
    return observation


def decided(folder: Path, limits: Limits = QUICK) -> np.ndarray:
    """What a submission decides once, in its sandbox."""
    with IsolatedPolicy(read_submission(folder), Account(limits)) as policy:
        policy.reset(2, 0)
        return policy.decide(seen())


def reason(folder: Path, limits: Limits = QUICK) -> str:
    """Why a submission is disqualified."""
    with pytest.raises(Disqualified) as caught:
        decided(folder, limits)
    return str(caught.value)


# --- what is refused before anything is loaded -----------------------------------------------------


def refused(folder: Path) -> str:
    with pytest.raises(SubmissionError) as caught:
        read_submission(folder)
    return str(caught.value)


def test_a_submission_is_read_with_its_checksums(tmp_path: Path) -> None:
    found = read_submission(submit(tmp_path / "greedy"))
    assert (found.name, found.metadata.author, list(found.files)) == ("submission/greedy", "somebody", ["greedy.py"])
    assert len(found.files["greedy.py"]) == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "Conductor!"}, "submission.yaml: name: expected 1 to 40 small letters"),
        ({"name": 3}, "submission.yaml: name: expected 1 to 40 small letters"),
        ({"author": ""}, "submission.yaml: author: expected text of 1 to 200"),
        ({"score": 1.0}, "submission.yaml: score: expected no such field"),
        ({"policy": "../other/policy.onnx"}, "submission.yaml: policy: expected FILE.onnx or MODULE.py:Class"),
        ({"policy": "os:system"}, "submission.yaml: policy: expected FILE.onnx or MODULE.py:Class"),
        ({"policy": "absent.onnx"}, "policy: absent.onnx is not in the folder"),
        ({"policy": "weights.pkl"}, "submission.yaml: policy: expected FILE.onnx or MODULE.py:Class"),
    ],
)
def test_wrong_metadata_names_the_field_and_what_was_expected(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = submit(tmp_path / "one")
    text = (folder / METADATA).read_text()
    kept = [line for line in text.splitlines() if line.partition(":")[0] not in fields]
    (folder / METADATA).write_text("\n".join(kept + [f"{key}: {json.dumps(value)}" for key, value in fields.items()]))
    assert message in refused(folder)


def test_metadata_that_is_none(tmp_path: Path) -> None:
    folder = submit(tmp_path / "one")
    for text, message in (
        ("- a\n- list\n", "expected name, author"),
        ("name: [", "cannot be read as YAML"),
        ("!!python/object/apply:os.system ['true']", "cannot be read as YAML"),
        ("a: " + "[" * 30000, "submission.yaml"),
        ("x" * 100_000, "more than 64 KiB"),
    ):
        (folder / METADATA).write_text(text)
        assert message in refused(folder)
    bomb = "\n".join(f"k{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(40))
    (folder / METADATA).write_text(f"{bomb}\nname: *a39\n")
    assert "submission.yaml: " in refused(folder)
    (folder / METADATA).unlink()
    assert "has no submission.yaml" in refused(folder)


def _torch_file(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("weights.pkl", lambda path: path.write_bytes(b"anything")),
        ("weights.pt", lambda path: path.write_bytes(b"anything")),
        *((f"protocol{n}.dat", lambda path, n=n: path.write_bytes(pickle.dumps(Path("x"), n))) for n in (0, 1, 2, 5)),
        ("torch.dat", _torch_file),
        ("objects.npy", lambda path: np.save(path, np.array([{}], object), allow_pickle=True)),
    ],
)
def test_pickles_are_refused_by_name_and_by_content(name: str, write: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = submit(tmp_path / "one")
    write(folder / name)
    assert refused(folder) == f"{name}: is a pickle, which runs code when it is read; expected .onnx"


def test_what_is_no_pickle_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(GOOD)
    (tmp_path / "dot.txt").write_text(".")
    np.save(tmp_path / "numbers.npy", np.arange(9.0))
    shutil.copy(LEARNED, tmp_path / "policy.onnx")
    assert not any(holds_pickle(path) for path in tmp_path.iterdir())


def test_links_devices_and_too_much_are_refused(tmp_path: Path) -> None:
    folder = submit(tmp_path / "one")
    (folder / "shadow").symlink_to("/etc/passwd")
    assert "shadow: is a link or a device" in refused(folder)
    (folder / "shadow").unlink()
    os.mkfifo(folder / "pipe")
    assert "pipe: is a link or a device" in refused(folder)
    (folder / "pipe").unlink()
    with (folder / "large.dat").open("wb") as file:
        file.truncate(65 << 20)
    assert "has more than 100 files or 64 MiB" in refused(folder)


def test_text_of_others_keeps_to_its_line() -> None:
    assert printable("a\x1b[2J\n\u202eb" + "c" * 500) == ("a [2J b" + "c" * 500)[:300]


# --- what a process can do -------------------------------------------------------------------------


def test_a_class_and_an_artifact_decide(tmp_path: Path) -> None:
    assert decided(submit(tmp_path / "greedy")).tolist() == [1, 1]
    artifact = submit(tmp_path / "learned", policy="policy.onnx")
    shutil.copy(LEARNED, artifact / "policy.onnx")
    assert (decided(artifact) >= 0).all()


def test_two_processes_that_choose_otherwise_are_found(tmp_path: Path) -> None:
    folder = does(tmp_path / "drawn", "return np.random.default_rng().integers(0, 2, len(o.request))")
    with Twins(read_submission(folder), Account(QUICK)) as policy:
        policy.reset(2, 0)
        with pytest.raises(Disqualified, match="is not deterministic"):
            [policy.decide(seen()) for _ in range(100)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('no such column')", "KeyError: 'no such column'"),
        ("import os; os._exit(7)", "its process ended with exit code 7"),
        ("import ctypes; ctypes.string_at(0)", "its process was killed by SIGSEGV"),
        ("return np.full(len(o.request), np.nan)", "decide() returned float64[2] with NaN; expected int64[2]"),
        ("return np.full(len(o.request), 4)", "chose prefill 0, decode 1, local, which the masks"),
        ("a = []\nwhile True: a.append(bytes(1 << 20))", "MemoryError"),
        ("import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'x' * 64)\n    except OSError: pass", "no answer"),
    ],
    ids=("raises", "exits", "crashes", "nan", "masked", "memory", "wire"),
)
def test_what_disqualifies(body: str, message: str, tmp_path: Path) -> None:
    assert message in reason(does(tmp_path / "one", body))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (13, "returned action 13; expected 0 .. 12"),
        (-1, "returned action -1; expected 0 .. 12"),
        (2, "chose prefill 0, decode 0, fetch, which the masks"),
        (10, "chose prefill 1, decode 1, local, which the masks"),
    ],
)
def test_actions_that_are_not_allowed(action: int, message: str) -> None:
    isolated._check_allowed(np.array([0, 9]), seen())
    with pytest.raises(Disqualified, match=message):
        isolated._check_allowed(np.array([7, action]), seen())


def test_endless_loops_end(tmp_path: Path) -> None:
    assert reason(does(tmp_path / "decides", "while True: pass"), QUICK._replace(decision_s=0.3)) == (
        "took more than 0.3 s for a decision"
    )
    importing = does(tmp_path / "imports", top="while True: pass")
    assert reason(importing, QUICK._replace(start_s=5)) == "took more than 5 s to load"
    slow = does(tmp_path / "slow", "import time; time.sleep(0.1)")
    account = Account(QUICK._replace(total_s=0.1))
    with pytest.raises(Disqualified, match=r"took more than 0\.1 s in all"):
        IsolatedPolicy(read_submission(slow), account)


@pytest.fixture
def listener() -> Iterator[int]:
    """A port of this machine on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_process_can_do_nothing_but_decide(listener: int, tmp_path: Path) -> None:
    """Everything that it tries is caught by itself; it reports what went through by the action it chooses."""
    outside = tmp_path / "result.json"
    outside.write_text("{}")
    (tmp_path / "secret").write_text("the future")
    attempts = f"""
import ctypes, os, signal, socket, subprocess, sys, threading
libc = ctypes.CDLL(None)
def write(path, flags): os.write(os.open(path, flags, 0o600), b"x")
def must(result):
    if result < 0: raise OSError
ATTEMPTS = [
    lambda: open({str(outside)!r}, "w"),
    lambda: os.open({str(outside)!r}, os.O_RDONLY | os.O_TRUNC),
    lambda: open({str(tmp_path / "new")!r}, "w"),
    lambda: open("inside", "w"),
    lambda: open("/tmp/conductor-submission", "w"),
    lambda: write("/dev/shm/conductor-submission", os.O_RDWR | os.O_CREAT),
    lambda: os.truncate({str(outside)!r}, 0),
    lambda: os.remove({str(outside)!r}),
    lambda: os.rename({str(outside)!r}, {str(tmp_path / "gone")!r}),
    lambda: os.chmod({str(outside)!r}, 0),
    lambda: os.mkdir("folder"),
    lambda: os.memfd_create("x"),
    lambda: socket.socket(),
    lambda: socket.socketpair(),
    lambda: socket.create_connection(("127.0.0.1", {listener})),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    lambda: os.fork(),
    lambda: subprocess.run(["/bin/true"]),
    lambda: os.execv("/bin/true", ["true"]),
    lambda: must(libc.vfork()),
    lambda: os.kill(os.getppid(), signal.SIGKILL),
    lambda: os.killpg(os.getpgid(os.getppid()), signal.SIGKILL),
    lambda: must(libc.ptrace(16, os.getppid(), 0, 0)),
    lambda: must(libc.shmget(0, 1 << 20, 0o1600)),
    lambda: must(libc.prctl(1, 0)),
    lambda: must(libc.setpriority(0, os.getppid(), 19)),
    lambda: os.sched_setaffinity(os.getppid(), [0]),
]
READS = [lambda: open({str(tmp_path / "secret")!r}), lambda: open("/etc/passwd"),
         lambda: open(f"/proc/{{os.getppid()}}/environ"), lambda: os.listdir("/home")]
if {sandbox.unlimited() is None}:
    ATTEMPTS += READS
came = 0
for i, attempt in enumerate(ATTEMPTS):
    try: attempt()
    except OSError: continue
    raise RuntimeError(f"attempt {{i}} went through")
threads = [threading.Thread(target=print) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("x" * (20 << 20)); print("x" * (20 << 20), file=sys.stderr)
"""
    assert decided(does(tmp_path / "one", "return np.ones(len(o.request), int)", top=attempts)).tolist() == [1, 1]
    assert outside.read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "result.json", "secret"]


def test_threads_end_with_the_process_and_a_bomb_of_them_does_no_harm(tmp_path: Path) -> None:
    bomb = "import threading, time\ntry:\n    while True: threading.Thread(target=time.sleep, args=(60,)).start()\n"
    bomb += "except (RuntimeError, MemoryError): pass\n"
    with IsolatedPolicy(read_submission(does(tmp_path / "one", bomb)), Account(QUICK)) as policy:
        policy.reset(2, 0)
        assert policy.decide(seen()).tolist() == [0, 0]
        process = policy._process.pid
    assert not Path(f"/proc/{process}").exists()


def test_an_artifact_with_a_loop_or_an_old_schema_is_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    cases = (("loop", "operator 'Loop'"), ("schema", "trained on another observation"))
    for kind, message in cases:
        folder = submit(tmp_path / kind, policy="policy.onnx")
        model = onnx.load(LEARNED)
        if kind == "loop":
            model.graph.node.append(onnx.helper.make_node("Loop", ["most", "", ""], ["x"]))
        elif kind == "schema":
            about = json.loads(model.metadata_props[0].value)
            about["observation"]["prefill"].remove("queue_s")
            model.metadata_props[0].value = json.dumps(about)
        (folder / "policy.onnx").write_bytes(model.SerializeToString())
        assert message in reason(folder)


def test_without_a_sandbox_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = does(tmp_path / "one")
    monkeypatch.setattr(sandbox, "why_not", lambda: "this kernel has no seccomp")
    assert leaderboard.main(["--submissions", str(folder), "--policies", "random"]) == leaderboard.EXIT_BAD_INPUT
    assert "nothing is run without a sandbox: this kernel has no seccomp" in capsys.readouterr().err


def test_a_kernel_without_landlock_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_landlock_version", lambda: -1)
    assert "this kernel has no Landlock: a submission can read" in leaderboard.note_on_submissions(Limits())


def test_a_sandbox_that_does_not_close_is_not_the_submissions_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    (tmp_path / "sitecustomize.py").write_text(thread)
    environment = isolated._environment()
    environment["PYTHONPATH"] += f":{tmp_path}"
    monkeypatch.setattr(isolated, "_environment", lambda: environment)
    with pytest.raises(NoSandbox, match="threads were started before"):
        decided(does(tmp_path / "one", top="raise SystemExit"))


# --- the board -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("traces") / "small.parquet"
    save(builtin("conversation", n_requests=200), path)
    return str(path)


CHEATS = """
import gc, os, signal, sys
sys.path.insert(0, os.environ["PYTHONPATH"])
import envs.metrics, envs.simulator
for module in list(sys.modules.values()):
    for name in ("score", "highest_load", "step", "decide"):
        if hasattr(module, name) and module.__name__.startswith(("envs", "leaderboard", "submissions")):
            setattr(module, name, lambda *given, **named: {"goodput": 1.0})
envs.metrics.Replay.good = 1.0
try: os.kill(os.getppid(), signal.SIGSTOP)
except OSError: pass
"""


@pytest.fixture(scope="module")
def inbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inbox")
    (submit(folder / "greedy") / METADATA).write_text(EXAMPLE.replace("Least", "<b>Least</b>"))
    submit(folder / "cheats", GOOD + CHEATS)
    does(folder / "loops", "while True: pass")
    (submit(folder / "pickled") / "w.dat").write_bytes(pickle.dumps(Path()))
    submit(folder / "twice", name="greedy")
    return folder


@pytest.fixture(scope="module")
def board(inbox: Path, trace_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two good and three bad submissions: result.json and site/ in a folder."""
    folder = tmp_path_factory.mktemp("board")
    cells = ["--trace", trace_file, "--part", "all", "--cluster", "1p2d", "--load", "2", "--seeds", "2"]
    limits = ["--limits", "decision_s=3,memory_gib=1"]
    outputs = ["--json", str(folder / "result.json"), "--site", str(folder / "site"), "--jobs", "2"]
    given = ["--policies", "random", "--submissions", str(inbox), *cells, *limits, *outputs]
    assert leaderboard.main(given) == 0
    return folder


def test_the_run_goes_on_and_says_who_is_disqualified(board: Path) -> None:
    result = json.loads((board / "result.json").read_text())
    assert {row["policy"] for row in result["rows"]} == {"random", "submission/greedy", "submission/cheats"}
    reasons = {each["policy"]: each["reason"] for each in result["disqualified"]}
    assert set(reasons) == {"submission/loops", "submission/pickled", "submission/twice"}
    assert reasons["submission/loops"] == "took more than 3 s for a decision"
    assert "is a pickle" in reasons["submission/pickled"]
    assert "is taken by" in reasons["submission/twice"]
    assert "submissions: each in processes of its own" in result["notes"]["submissions"]


def test_a_cheat_has_the_figures_of_what_it_decides(board: Path) -> None:
    rows = {row["policy"]: row for row in json.loads((board / "result.json").read_text())["rows"]}
    honest, cheat = (simulated(rows[f"submission/{name}"]) for name in ("greedy", "cheats"))
    assert honest | {"policy": ""} == cheat | {"policy": ""}
    assert 0 < honest["goodput"] < 1


def test_a_sandboxed_policy_decides_as_it_does_outside(board: Path, trace_file: str, inbox: Path) -> None:
    (inbox.parent / "greedy_outside.py").write_text(GOOD)
    rows = {row["policy"]: row for row in json.loads((board / "result.json").read_text())["rows"]}
    setting = leaderboard.make_wanted(
        leaderboard.parser().parse_args(["--trace", trace_file, "--part", "all", "--cluster", "1p2d", "--seeds", "2"])
    )[0].setting
    namespace: dict[str, Any] = {}
    exec(GOOD, namespace)
    policy = namespace["Greedy"]()
    policy.recheck, policy.reset = True, lambda clusters, seed: None
    replays = leaderboard.replay_stepped(policy, "greedy", setting, [(2.0, 0), (2.0, 1)])
    good = float(np.mean([replay.good.mean() for replay in replays]))
    assert rows["submission/greedy"]["goodput"] == pytest.approx(good)


def test_the_site_shows_submissions_and_who_is_disqualified(board: Path, inbox: Path) -> None:
    shown = read_site(board / "site")
    assert {each["policy"] for each in shown["disqualified"]} >= {"submission/loops", "submission/pickled"}
    page = next(policy for policy in shown["policies"] if policy["policy"] == "submission/greedy")
    facts = {name: value for name, value, _ in (fact.values() for fact in page["configuration"])}
    assert facts["description"].startswith("<b>Least</b> predicted TTFT") and facts["author"] == "A. Nonymous"
    assert facts["greedy.py"] == f"sha256 {read_submission(inbox / 'greedy').files['greedy.py']}"
    assert f"--submissions {inbox / 'greedy'}" in page["command"]


def test_its_command_alone_gives_the_same_figures(board: Path, tmp_path: Path) -> None:
    result = json.loads((board / "result.json").read_text())
    alone = next(policy for policy in result["policies"] if policy["policy"] == "submission/greedy")["command"]
    file = tmp_path / "alone.json"
    assert leaderboard.main([*leaderboard.shlex.split(alone)[2:], "--json", str(file)]) == 0
    assert simulated(json.loads(file.read_text())["rows"][0]) == simulated(
        next(row for row in result["rows"] if row["policy"] == "submission/greedy")
    )
    changed = json.loads(file.read_text())
    changed["rows"][0]["goodput"] += 1e-9
    changed["policies"][0]["configuration"][-1]["value"] = "sha256 0"
    found = differences(changed, json.loads(file.read_text()))
    assert len(found) == 2 and found[0].startswith("rows[submission/greedy, ")


def test_a_rerun_that_differs_says_where(trace_file: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "result.json"
    cells = ["--trace", trace_file, "--part", "all", "--cluster", "1p2d", "--load", "2"]
    assert leaderboard.main(["--policies", "random", *cells, "--json", str(file)]) == 0
    assert leaderboard.main(["--rerun", str(file)]) == 0
    assert "the same: all figures of 1 rows" in capsys.readouterr().out
    result = json.loads(file.read_text())
    result["rows"][0]["good"] += 1
    file.write_text(json.dumps(result))
    capsys.readouterr()
    assert leaderboard.main(["--rerun", str(file)]) == leaderboard.EXIT_DIFFERS
    said = capsys.readouterr().out
    assert "not the same: 1 figures differ" in said and "rows[random, " in said


def test_a_rerun_is_of_what_the_file_says(tmp_path: Path, capsys: Any) -> None:
    given = ["--rerun", str(tmp_path / "result.json"), "--suite", "heldout"]
    assert leaderboard.main(given) == leaderboard.EXIT_BAD_INPUT
    assert "--suite does not go with --rerun" in capsys.readouterr().err


def test_a_file_that_is_no_result(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "other.json").write_text('{"rows": []}')
    assert leaderboard.main(["--rerun", str(tmp_path / "other.json")]) == leaderboard.EXIT_BAD_INPUT
    assert "expected what --json wrote" in capsys.readouterr().err


def test_differences_name_the_place() -> None:
    rows = [{"policy": "a", "cell": "c", "goodput": 0.5, "decision_us": 1.0}]
    before: dict[str, Any] = {"rows": rows, "command": "x"}
    now: dict[str, Any] = {"rows": [rows[0] | {"goodput": 0.25, "decision_us": 2.0}], "command": "y"}
    assert differences(before, before) == []
    assert differences(before, now) == ["rows[a, c].goodput: 0.5, now 0.25"]


@pytest.mark.parametrize("text", ["seconds=3", "decision_s=0", "decision_s=much"])
def test_limits_that_are_none(text: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        leaderboard.main(["--submissions", str(tmp_path), "--limits", text])
    assert "--limits" in capsys.readouterr().err
