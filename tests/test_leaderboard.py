"""`leaderboard.py` as it is used: replays of real and built-in traces, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leaderboard
from envs.state import Observation
from leaderboard import Cell, Contestant, make_part, make_setting
from policies import CompiledPolicy, make_policy
from policies.tuned import tuned
from traces import Trace, builtin, load, save

ROOT = Path(__file__).parents[1]
REAL = ROOT.parent / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
VOLATILE = ("decision_us", "decision_alone_us", "code_version")


class Wrapped:
    """A Python policy around a compiled one."""

    inner = "conductor"
    recheck = True

    def __init__(self) -> None:
        self.policy = make_policy(self.inner)

    def reset(self, clusters: int, seed: int) -> None:
        self.policy.reset(clusters, seed)

    def decide(self, observation: Observation) -> np.ndarray:
        return self.policy.decide(observation)


class WrappedRandom(Wrapped):
    inner = "random"
    recheck = False


class RejectsAll:
    def decide(self, observation: Observation) -> np.ndarray:
        return np.zeros(len(observation.request), np.int64)


class WrongShape:
    def decide(self, observation: Observation) -> np.ndarray:
        return np.zeros((len(observation.request), 2), np.int64)


class WrongType:
    def decide(self, observation: Observation) -> np.ndarray:
        return np.zeros(len(observation.request))


class OutOfRange:
    def decide(self, observation: Observation) -> np.ndarray:
        return np.full(len(observation.request), 9999)


class Raises:
    def decide(self, observation: Observation) -> np.ndarray:
        raise KeyError("no such column")


class NeedsArguments:
    def __init__(self, path: str) -> None: ...

    def decide(self, observation: Observation) -> np.ndarray:
        return np.zeros(1, np.int64)


@pytest.fixture(scope="module")
def small() -> Trace:
    return builtin("conversation", n_requests=400)


@pytest.fixture(scope="module")
def small_file(small: Trace, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("traces") / "small.parquet"
    save(small, path)
    return str(path)


def cells_of(
    trace: Trace, loads: tuple[float, ...], part: str = "all", cluster: str = "2p2d", seeds: int = 1
) -> list[Cell]:
    made = make_part(trace, part, 0, seeds, trace.name)
    setting = make_setting(trace, made, cluster)
    return [Cell(setting, load) for load in loads]


def rows_of(
    names: list[str], cells: list[Cell], seeds: int = 1, **options: Any
) -> dict[tuple[str, float], dict[str, Any]]:
    contestants = [Contestant(name) for name in names]
    result = leaderboard.evaluate(contestants, cells, seeds=range(seeds), **options)
    return {(row["policy"], row["load"]): row for row in result.rows}


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says about the cluster: all but its name and what is measured by the clock."""
    return {key: value for key, value in row.items() if key not in (*VOLATILE, "policy")}


def run_cli(*given: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "leaderboard.py"), *given]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


# --- the real trace --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversation() -> dict[tuple[str, float], dict[str, Any]]:
    if not REAL.is_file():
        pytest.skip(f"public trace absent: {REAL}")
    cells = cells_of(load(REAL), (1.0,), cluster="8p8d")
    routers = ("conductor", "cache_aware", "load_balancing", "random")
    return rows_of([f"{router}+none" for router in routers], cells)


def test_papers_order_of_mean_ttft(conversation: dict[tuple[str, float], dict[str, Any]]) -> None:
    """[A] figure 8: KVCache-centric < cache-aware < load balancing, random far behind."""
    ttft = {name: row["ttft_mean_s"] for (name, _), row in conversation.items()}
    assert ttft["conductor+none"] < ttft["cache_aware+none"] < ttft["load_balancing+none"]
    assert ttft["random+none"] > 2 * ttft["load_balancing+none"]


def test_published_prefill_time(conversation: dict[tuple[str, float], dict[str, Any]]) -> None:
    assert conversation["conductor+none", 1.0]["prefill_mean_s"] == pytest.approx(1.06, rel=0.1)


def test_whole_part_is_offered(conversation: dict[tuple[str, float], dict[str, Any]]) -> None:
    assert {row["offered"] for row in conversation.values()} == {12031}


# --- replays ---------------------------------------------------------------------------------------


def test_counts_add_up(small: Trace) -> None:
    names = ["conductor", "conductor+early", "random", "lmetric+baseline"]
    for row in rows_of(names, cells_of(small, (1.0, 8.0), seeds=4), seeds=4).values():
        rejected = row["rejected_at_arrival"] + row["rejected_at_decode"]
        assert row["offered"] == row["completed"] + rejected == 400
        assert row["completed"] == row["good"] + row["violated"]
        assert row["violated"] == row["violated_ttft"] + row["violated_tbt"]
        assert row["goodput"] == pytest.approx(row["good"] / row["offered"], abs=1e-12)
        assert row["goodput_low"] <= row["goodput"] <= row["goodput_high"]
        assert len(row["runs"]) == 4


def test_stepped_policy_equals_the_compiled_one_it_wraps(small: Trace) -> None:
    cells = cells_of(small, (2.0, 6.0), seeds=2)
    rows = rows_of(["conductor", "tests.test_leaderboard:Wrapped"], cells, 2, sustained=True)
    for speed in (2.0, 6.0):
        stepped = rows["tests.test_leaderboard:Wrapped", speed]
        assert figures(stepped) == figures(rows["conductor", speed])


def test_stepped_random_policy_has_the_same_stream(small: Trace) -> None:
    rows = rows_of(["random", "tests.test_leaderboard:WrappedRandom"], cells_of(small, (2.0,)))
    stepped = rows["tests.test_leaderboard:WrappedRandom", 2.0]
    assert figures(stepped) == figures(rows["random", 2.0])


def test_twice_is_the_same_whatever_the_threads(small: Trace) -> None:
    names = ["random", "power_of_two", "conductor+predictive"]

    def once(jobs: int) -> list[dict[str, Any]]:
        pool = leaderboard.Pool(jobs, leaderboard.Progress())
        cells = cells_of(small, (1.0, 4.0), seeds=3)
        rows = rows_of(names, cells, 3, pool=pool, sustained=True)
        return [{"policy": row["policy"]} | figures(row) for row in rows.values()]

    assert once(1) == once(2)


def test_seeds_move_arrivals_but_not_requests(small: Trace) -> None:
    part = make_part(small, "test", 0, 3, "small")
    first, second, third = part.traces
    assert (first.input_tokens == second.input_tokens).all()
    assert not (second.arrival_s == third.arrival_s).all()


def test_warmup_is_simulated_but_not_counted(small: Trace) -> None:
    cold, warm = make_part(small, "test", 0, 1, "small"), make_part(small, "test", 100, 1, "small")
    assert cold.requests == warm.requests == small.split().test.n_requests
    rows = {
        part.warmup: next(iter(rows_of(["conductor+none"], [Cell(setting, 1.0)]).values()))
        for part in (cold, warm)
        for setting in [make_setting(small, part, "2p2d")]
    }
    assert rows[0]["offered"] == rows[100]["offered"]
    assert rows[100]["hit_rate"] > rows[0]["hit_rate"]
    assert make_part(small, "train", 100, 1, "small").warmup == 0  # nothing comes before
    whole = make_part(small, "all", 100, 1, "small")
    assert (whole.warmup, whole.requests) == (100, 300)
    with pytest.raises(leaderboard.LeaderboardError, match="warmup of 400: trace 'small' has 400 requests"):
        make_part(small, "all", 400, 1, "small")


def test_sustained_load_is_met_and_a_little_more_is_not(small: Trace) -> None:
    cells = cells_of(small, (1.0,))
    found = rows_of(["cache_aware"], cells, sustained=True)["cache_aware", 1.0]["load_at_90"]
    rows = rows_of(["cache_aware"], cells_of(small, (found, found * 1.021)))
    attained = [row["goodput"] for row in rows.values()]
    assert attained[0] >= 0.9 > attained[1]


def test_winner_only_where_the_paired_interval_excludes_zero(small: Trace) -> None:
    cells = cells_of(small, (2.0,), seeds=2)
    names = ["conductor", "tests.test_leaderboard:RejectsAll", "conductor+slo"]
    result = leaderboard.evaluate([Contestant(name) for name in names], cells, seeds=range(2))
    assert result.winner is None  # conductor+slo is conductor
    assert result.paired is not None
    assert result.paired["baseline"] == "conductor+slo"
    assert (result.paired["low"], result.paired["high"]) == (0.0, 0.0)
    clear = leaderboard.evaluate([Contestant(name) for name in names[:2]], cells, seeds=range(2))
    assert clear.winner == "conductor"
    assert clear.paired is not None and clear.paired["low"] > 0


def test_a_policy_that_rejects_all_has_a_row(small: Trace) -> None:
    name = "tests.test_leaderboard:RejectsAll"
    row = rows_of([name], cells_of(small, (1.0,)))[name, 1.0]
    assert row["rejected_at_arrival"] == 400
    assert row["goodput"] == 0.0


@pytest.mark.parametrize("name", leaderboard.default_policies())
def test_every_heuristic_runs(name: str, small: Trace) -> None:
    assert isinstance(make_policy(name), CompiledPolicy)
    row = rows_of([name], cells_of(small, (1.0,)))[name, 1.0]
    assert row["offered"] == 400 and row["decision_us"] > 0


# --- command line ----------------------------------------------------------------------------------

KEYS = {
    *("policy", "goodput", "goodput_low", "goodput_high", "offered", "completed", "violated"),
    *("rejected_at_arrival", "rejected_at_decode", "wasted_prefill_s", "ttft_mean_s"),
    *("ttft_p90_s", "tbt_p90_s", "hit_rate", "decision_us"),
}


def test_json_on_stdout_is_all_there_is(small_file: str) -> None:
    done = run_cli(
        *("--policies", "conductor,cache_aware,conductor:threshold=3,min_over_both=1+early"),
        *("--trace", small_file, "--part", "test", "--cluster", "2p2d", "--load", "1,4"),
        *("--json", "-"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["rows"]) == 6
    for row in found["rows"]:
        assert set(row) >= KEYS
        assert 0 <= row["goodput_low"] <= row["goodput"] <= row["goodput_high"] <= 1
    assert found["paired"]["policy"] == "conductor"
    assert "bootstrap" in found["notes"]["method"]


def test_capacity_files_and_table(small_file: str, tmp_path: Path) -> None:
    out, curve = tmp_path / "out.json", tmp_path / "curve.png"
    done = run_cli(
        *("--policies", "conductor,random", "--trace", small_file, "--part", "all"),
        *("--cluster", "2p2d", "--capacity", "0.8,1.2", "--seeds", "1"),
        *("--json", str(out), "--plot", str(curve)),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    capacity = found["capacities"][0]["load"]
    assert {round(row["load"] / capacity, 9) for row in found["rows"]} == {0.8, 1.2}
    assert "capacity of" in done.stdout and "1.2 x capacity" in done.stdout
    assert curve.stat().st_size > 1000


@pytest.fixture(scope="module")
def suite_file(small_file: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("suites") / "tiny.yaml"
    path.write_text(
        f"""
warmup: 20
seeds: 2
settings:
  - {{name: small, trace: {small_file}, part: all, cluster: 2p2d, capacity: [0.5, 1, 2]}}
  - {{name: late, trace: {small_file}, part: test, cluster: 1p2d, capacity: [1]}}
"""
    )
    return str(path)


def test_a_suite_compares_the_first_policy_cell_by_cell(suite_file: str, capsys: Any) -> None:
    given = ["--suite", suite_file, "--policies", "random,conductor,cache_aware", "--json", "-"]
    assert leaderboard.main(given) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["small-0.5x", "small-1x", "small-2x", "late-1x"]
    assert [cell["cell"] for cell in found["cells"]] == names
    assert len(found["rows"]) == 12
    rows = {(row["cell"], row["policy"]): row for row in found["rows"]}
    for row in found["rows"]:
        assert set(row) >= KEYS
        assert row["times_capacity"] * row["capacity"] == pytest.approx(row["load"])
        assert (row["seeds"], row["warmup"]) == (2, 20)
    assert {row["offered"] for row in found["rows"] if row["cell"].startswith("small")} == {380}

    def mean_difference(of_cells: list[str], baseline: str) -> float:
        return float(np.mean([rows[cell, "random"]["goodput"] - rows[cell, baseline]["goodput"] for cell in of_cells]))

    for key, of_cells in (("paired", names), ("paired_saturated", names[1:])):
        paired = found[key]
        assert paired["policy"] == "random"
        assert paired["mean"] == pytest.approx(mean_difference(of_cells, paired["baseline"]))
        assert paired["low"] <= paired["mean"] <= paired["high"]
    relative = {}
    for cell in found["cells"]:
        best = max(("conductor", "cache_aware"), key=lambda name: rows[cell["cell"], name]["goodput"])
        assert cell["first"]["baseline"] == best
        assert cell["first"]["mean"] == pytest.approx(mean_difference([cell["cell"]], best))
        relative[cell["cell"]] = cell["first"]["mean"] / rows[cell["cell"], best]["goodput"]
        assert cell["first"]["relative"] == pytest.approx(relative[cell["cell"]])
    assert found["worst"]["cell"] == min(relative, key=lambda name: relative[name])


def test_some_cells_of_a_suite_as_a_table(suite_file: str, capsys: Any) -> None:
    given = ["--suite", suite_file, "--cells", "*-1x", "--policies", "conductor,random", "--seeds", "1"]
    assert leaderboard.main(given) == 0
    shown = capsys.readouterr().out
    assert "small-1x: " in shown and "late-1x: " in shown and "small-2x" not in shown
    for line in ("over all 2 cells: conductor minus", "over the cells at or past capacity: ", "worst cell, "):
        assert line in shown


def test_headroom_is_above_every_policy(suite_file: str, capsys: Any) -> None:
    given = ["--suite", suite_file, "--cells", "small*", "--policies", "conductor,random", "--headroom"]
    assert leaderboard.main([*given, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    for row in found["rows"]:
        assert row["goodput"] <= row["bound"] <= 1
        assert row["bound_landing_s"] == 10
    assert [cell["bound"] for cell in found["cells"]] == [row["bound"] for row in found["rows"][::2]]
    assert leaderboard.main(given) == 0
    shown = capsys.readouterr().out
    assert shown.count("no policy: more than ") == 3
    assert "at most " in shown and "(upper bound) in the mean" in shown


def test_a_suite_compares_tuned_heuristics_unless_told(
    suite_file: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert leaderboard.suite_policies() == ["learned", *tuned().values()]
    two = {"conductor+slo": "conductor:threshold=1.2+slo:threshold=.91", "random": "random"}
    monkeypatch.setattr(leaderboard, "tuned", lambda: two)
    given = ["--suite", suite_file, "--cells", "late*", "--seeds", "1", "--json", "-"]
    assert leaderboard.main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["policy"] for row in found["rows"]} == {"learned", *two.values()}
    assert found["paired"]["policy"] == "learned"


@pytest.mark.parametrize("option", ["--trace", "--part", "--cluster", "--load", "--capacity", "--warmup", "--log"])
def test_a_suite_says_where_it_is_evaluated(option: str, capsys: Any) -> None:
    assert leaderboard.main(["--suite", "heldout", option, "1"]) == 2
    assert f"error: {option} does not go with --suite" in capsys.readouterr().err


BAD = {
    "unknown policy": (["--policies", "best"], "cache_aware"),
    "unknown option": (["--policies", "conductor:speed=1"], "threshold"),
    "unknown admission": (["--policies", "random+some"], "predictive"),
    "unknown module": (["--policies", "no_such_module:Policy"], "cannot import"),
    "unknown class": (["--policies", "tests.test_leaderboard:Nobody"], "Nobody"),
    "class with arguments": (["--policies", "tests.test_leaderboard:NeedsArguments"], "TypeError"),
    "unknown cluster": (["--cluster", "eight"], "8p8d"),
    "unknown part": (["--part", "last"], "validation"),
    "cells of nothing": (["--cells", "*-1x"], "--suite"),
    "no such trace": (["--trace", "absent.jsonl"], "absent.jsonl"),
    "no such workload": (["--trace", "builtin:chess"], "conversation"),
    "load zero": (["--load", "0"], "above 0"),
    "load nan": (["--load", "1,nan"], "above 0"),
    "load negative": (["--load=-1"], "above 0"),
    "capacity word": (["--capacity", "much"], "above 0"),
    "no seeds": (["--seeds", "0"], ">= 1"),
    "no such folder": (["--json", "absent/folder/out.json"], "folder"),
    "unknown flag": (["--polices", "random"], "--polices"),
    "wrong shape": (["--policies", "tests.test_leaderboard:WrongShape"], "expected one integer"),
    "wrong type": (["--policies", "tests.test_leaderboard:WrongType"], "float64"),
    "out of range": (["--policies", "tests.test_leaderboard:OutOfRange"], "action 9999"),
    "raises": (["--policies", "tests.test_leaderboard:Raises"], "KeyError"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, small_file: str, capsys: Any) -> None:
    given, expected = BAD[case]
    others = ["--trace", small_file] if "--trace" not in given else []
    if "--policies" not in given:
        others += ["--policies", "conductor"]
    try:
        code = leaderboard.main([*given, *others])
    except SystemExit as stop:  # argparse
        code = stop.code  # type: ignore[assignment]
    written = capsys.readouterr()
    assert code == 2
    assert written.out == ""
    assert written.err.count("\n") == 1 and written.err.startswith("error: ")
    assert expected in written.err


def test_help_and_list_teach(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        leaderboard.main(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert "examples:" in shown and "10p10d" in shown and "power_of_two" in shown
    assert leaderboard.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert "threshold=1.5" in shown and "  conversation-8p8d-1.5x" in shown
    assert leaderboard.main(["--suite", "list"]) == 0
    assert capsys.readouterr().out.startswith("suite heldout: ")
    assert leaderboard.main(["--suite", "heldout", "--cells", "chess*"]) == 2
    assert "--cells chess*: suite heldout has conversation-8p8d-0.8x" in capsys.readouterr().err
    assert leaderboard.main(["--suite", "best"]) == 2
    assert "built in are heldout" in capsys.readouterr().err


def test_heavy_libraries_are_not_loaded() -> None:
    script = (
        "import sys, leaderboard; leaderboard.list_policies(); leaderboard.parser();"
        "print([m for m in ('torch', 'ray', 'stable_baselines3', 'matplotlib') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stderr


class Scribbler:
    """Tries to write to what it is shown."""

    def decide(self, observation):  # type: ignore[no-untyped-def]
        observation.decode_mask[:] = 0
        return np.ones(len(observation.request), np.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", ","], "expected at least one policy"),
        (["--plot", "x.xyz"], "--plot x.xyz: expected a name that ends in .png, .svg, .pdf"),
        (["--load", "1", "--capacity", "1"], "--load and --capacity both give the load"),
        (
            ["--policies", "tests.test_leaderboard:Scribbler", "--load", "1", "--seeds", "1"],
            "decide() raised ValueError: assignment destination is read-only",
        ),
    ],
)
def test_more_bad_input(arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, "leaderboard.py", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
