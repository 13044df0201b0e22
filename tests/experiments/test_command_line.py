"""`python -m experiments`: names, tables, JSON, the page, errors; and the verdicts that must hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from experiments import command, page
from experiments.experiment import (
    Between,
    Experiment,
    Outcome,
    Panel,
    Result,
    Row,
    Series,
    Setting,
    TraceShelf,
    Within,
    experiments,
    run,
)
from experiments.parameters import Parameters
from experiments.report import VERDICTS, as_json
from traces import released

ROOT = Path(__file__).parents[2]
KEYS = ["experiment", "quantity", "ours", "paper", "tolerance", "holds", "fitted"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    def go(*arguments: object) -> tuple[int, str, str]:
        code = command.main([str(argument) for argument in arguments])
        out, errors = capsys.readouterr()
        return code, out, errors

    return go


def fake(name: str, *rows: Row, panels: tuple[Panel, ...] = ()) -> Experiment:
    return Experiment(
        name, f"{name} title", "The paper did.", lambda _: Result(rows, panels, ["A remark [with brackets]."])
    )


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experiments in place of the real ones, the first on a figure that a parameter was fitted on."""
    panel = Panel("t", "x", "y", [Series("a", [1, 2], [1.0, None]), Series("a", [1, 2], [1.0, 2.0], of_paper=True)])
    bars = Panel("t", "", "y", [Series("a", ["u", "v_w"], [1.0, 2.0]), Series("a", ["v_w"], [2.0], of_paper=True)])
    fitted = fake("fast_fig15_pd_ratio", Row("good", 1.0, 1.0, Within(0.1)), Row("bad", 2.0, 1.0, Within(share=0.1)))
    other = fake("arxiv_fig02_x", Row("context", 12345.6), Row("range", 3.0, 2.0, Between(low=1)), panels=(panel, bars))
    known = {e.name: e for e in (fitted, other)}
    monkeypatch.setattr(command, "experiments", lambda: known)


# --- on small experiments ------------------------------------------------------------------------


@pytest.mark.usefixtures("two")
def test_json_has_the_rows_and_nothing_else(cli: Run) -> None:
    code, out, errors = cli("--all", "--json", "-")
    document = json.loads(out)
    assert code == 0
    assert list(document) == ["rows", "traces", "quick", "flips"]
    assert document["traces"] == {"fast_fig15_pd_ratio": {}, "arxiv_fig02_x": {}}
    assert (document["quick"], document["flips"]) == (False, None)
    assert [list(row) for row in document["rows"]] == [KEYS] * 4
    assert [tuple(row.values())[1:] for row in document["rows"]] == [
        ("good", 1.0, 1.0, 0.1, True, True),
        ("bad", 2.0, 1.0, 0.1, False, True),
        ("context", 12345.6, None, None, None, "arxiv_fig02_x" in Parameters.load().fitted_on),
        ("range", 3.0, 2.0, ">= 1", True, "arxiv_fig02_x" in Parameters.load().fitted_on),
    ]
    assert "2/2" in errors


@pytest.mark.usefixtures("two")
def test_tables_remarks_and_summary(cli: Run, tmp_path: Path) -> None:
    code, out, _ = cli("fast_fig15_pd_ratio", "arxiv_fig02_x", "--json", tmp_path / "rows.json")
    assert code == 0
    line = next(line for line in out.splitlines() if "bad" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "bad",
        "2",
        "1",
        "+1",
        "± 10 %",
        "does not hold",
        "fitted",
    ]
    assert "12,346" in out
    assert "A remark [with brackets]." in out
    assert out.splitlines()[-1].endswith("2 rows hold, 1 do not hold, 1 are context")
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 4


@pytest.mark.usefixtures("two")
def test_check_fails_when_a_row_does_not_hold(cli: Run) -> None:
    assert cli("--all", "--check")[0] == 1
    assert cli("arxiv_fig02_x", "--check")[0] == 0


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "no experiment is called 'nosuch'; there are fast_fig15_pd_ratio, arxiv_fig02_x"),
        ([], "nothing to run"),
        (["arxiv_fig02_x", "--all"], "expected one of them"),
        (["arxiv_fig02_x", "--write"], "expected --all"),
        (["--all", "--quick", "--write"], "no --quick"),
        (["--all", "--jobs", "0"], "expected 1 or more"),
        (["--all", "--traces", "/nowhere"], "expected a folder"),
        (["--all", "--json", "/nowhere/x.json"], "a folder that exists"),
        (["--all", "--json", "/"], "--json /: cannot be written"),
        (["--all", "--json", "/proc/x.json"], "--json /proc/x.json: cannot be written"),
        (["--all", "--json", ""], "expected a file, or -"),
        (["--list", "arxiv_fig02_x"], "expected no NAME"),
        (["--list", "--json", "-"], "no --json"),
        (["fast_fig15"], "did you mean fast_fig15_pd_ratio?"),
    ],
)
def test_bad_input_is_one_line_and_code_2(cli: Run, arguments: list[str], message: str) -> None:
    code, out, errors = cli(*arguments)
    assert (code, out) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert message in errors


@pytest.mark.usefixtures("two")
def test_what_an_earlier_run_wrote_is_kept_until_there_is_something_new(cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text("old")
    assert cli("nosuch", "--json", file)[0] == 2
    assert file.read_text() == "old"
    command.check_writable(file)
    command.check_writable(tmp_path / "new.json")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_what_goes_wrong_inside_an_experiment_is_one_line(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Experiment("fast_fig1_x", "", "", lambda setting: Result([Row("x", 1 / len(setting.origins))]))
    monkeypatch.setattr(command, "experiments", lambda: {faulty.name: faulty})
    code, out, errors = cli("--all")
    assert (code, out) == (2, "")
    assert errors == (
        "error: experiment fast_fig1_x: ZeroDivisionError: division by zero (--debug shows the traceback)\n"
    )
    with pytest.raises(command.ExperimentError) as told:
        cli("--all", "--debug")
    assert isinstance(told.value.__cause__, ZeroDivisionError)


def test_json_has_the_flips(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def go(setting: Setting) -> Result:
        return Result([Row("theta", setting.parameters.balancing_threshold.value, 0, Between(high=2))])

    theta = Experiment("fast_fig1_x", "", "", go)
    monkeypatch.setattr(command, "experiments", lambda: {theta.name: theta})
    _, out, _ = cli("--all", "--quick", "--sensitivity", "--json", "-")
    document = json.loads(out)
    assert document["quick"] is True
    assert document["flips"] == [
        {
            "parameter": "balancing_threshold",
            "value": "x 2",
            "experiment": "fast_fig1_x",
            "quantity": "theta",
            "change": "holds no more",
        }
    ]


@pytest.mark.parametrize("options", [["--json", "-"], ["--traces", "."]])
def test_stand_ins_are_told_once_each(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(released, "CHECKOUT", tmp_path)
    asking = [
        Experiment(f"fast_fig{i}_x", "", "", lambda setting: Result([Row("x", setting.trace("synthetic").n_requests)]))
        for i in (1, 2)
    ]
    monkeypatch.setattr(command, "experiments", lambda: {e.name: e for e in asking})
    code, out, errors = cli("--all", *options)
    assert code == 0
    assert [line for line in errors.splitlines() if line.startswith("warning: ")] == [
        f"warning: no synthetic_trace.jsonl in {'data or ../shared/traces' if '--json' in options else '.'}: "
        "a stand-in was used"
    ]
    if "--json" in options:
        origins = json.loads(out)["traces"]
        assert list(origins) == ["fast_fig1_x", "fast_fig2_x"]
        assert all(text.startswith("stand-in builtin:synthetic") for text in origins["fast_fig2_x"].values())
    assert not [line for line in cli("--all")[2].splitlines() if line.startswith("warning: ")]


def test_a_trace_file_that_cannot_be_read_is_one_line(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "conversation_trace.jsonl").write_text("nonsense\n")
    code, out, errors = cli("fast_fig05_schedulers", "--traces", tmp_path)
    assert (code, out) == (2, "")
    assert "conversation_trace.jsonl" in errors.splitlines()[-1]


@pytest.mark.usefixtures("two")
def test_the_page_and_its_pictures(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "DOCS", tmp_path)
    (tmp_path / "reproduction").mkdir()
    (tmp_path / "reproduction" / "of_an_experiment_that_is_gone.png").write_bytes(b"")
    assert cli("--all", "--write", "--sensitivity")[0] == 0
    text = (tmp_path / "reproduction.md").read_text()
    assert "## fast_fig15_pd_ratio" in text
    assert "| bad | 2 | 1 | +1 | ± 10 % | does not hold | fitted |" in text
    assert "## Sensitivity" in text
    assert "| `arrivals` |" in text
    assert "\n## arxiv_fig02_x" in text
    for name in Parameters.load().numbers:
        assert f"| `{name}` |" in text
    pictures = list((tmp_path / "reproduction").iterdir())
    assert [picture.name for picture in pictures] == ["arxiv_fig02_x.png"]
    assert "(reproduction/arxiv_fig02_x.png)" in text
    found = "Found with this page, by `python -m experiments --all --write --sensitivity"
    assert found in text
    assert "2 rows hold, 1 do not hold, 1 are context. Rows of context have no tolerance" in text
    for _ in range(2):
        assert cli("--all", "--write")[0] == 0
        kept = (tmp_path / "reproduction.md").read_text()
        assert [line for line in kept.splitlines() if line.startswith("Kept from an earlier run")] != []
        assert found not in kept
        without = [
            [line for line in page_text.splitlines() if not line.startswith(("Found with", "Kept from"))]
            for page_text in (text, kept)
        ]
        assert without[0] == without[1]  # the sensitivity table, too
    pixels = matplotlib.image.imread(pictures[0])
    assert pixels.shape[1] > 2 * pixels.shape[0]  # two panels side by side
    assert (pixels[0, 0, :3] == 1).all()  # on white, for dark pages too


@pytest.mark.usefixtures("two")
def test_a_picture_that_cannot_be_drawn_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "reproduction" / "arxiv_fig02_x.png"
    old.parent.mkdir()
    old.write_bytes(b"old")

    def draw(result: Result) -> bytes:
        raise RuntimeError("no canvas")

    monkeypatch.setattr(page, "DOCS", tmp_path)
    monkeypatch.setattr(page, "draw", draw)
    with pytest.raises(RuntimeError, match="no canvas"):
        command.main(["--all", "--write"])
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [old]
    assert old.read_bytes() == b"old"


@pytest.mark.usefixtures("two")
def test_list_and_help(cli: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("--list") == (
        0,
        "fast_fig15_pd_ratio  fast_fig15_pd_ratio title\narxiv_fig02_x        arxiv_fig02_x title\n",
        "",
    )
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    assert end.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_ctrl_c_while_importing_is_quiet() -> None:
    interrupted = """
import runpy, sys
class CtrlC:
    def find_spec(self, name, *_):
        if name == "traces.trace":
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
runpy.run_module("experiments", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", interrupted], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


# --- on the real ones ----------------------------------------------------------------------------


def test_two_cheap_experiments_on_the_released_traces(real_traces: Path) -> None:
    """As somebody would run it: the figures the issue asks for, to 0.005, from the command line."""
    names = ["arxiv_table1_hit_rate", "fast_fig05_schedulers"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments", *names, "--quick", "--traces", str(real_traces), "--json", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    assert {row["experiment"] for row in rows} == set(names)
    counted = [r for r in rows if r["quantity"].startswith(("conversation LRU", "synthetic LRU", "conversation LFU"))]
    assert len(counted) == 18
    assert all(abs(row["ours"] - row["paper"]) <= 0.005 and row["holds"] for row in counted)
    ratio = next(row for row in rows if row["quantity"] == "mean TTFT, conductor / cache_aware" and row["paper"] < 0.9)
    assert abs(ratio["ours"] - 0.86) <= 0.08


def test_experiments_run_without_any_file(cli: Run, tmp_path: Path) -> None:
    code, out, _ = cli("arxiv_fig06_block_popularity", "arxiv_fig07_layerwise_store", "--quick", "--traces", tmp_path)
    assert code == 0
    assert "stand-in builtin:toolagent" in out


def outcomes_of(names: list[str], traces: Path) -> list[Outcome]:
    setting = Setting(shelf=TraceShelf(traces))
    return [run(experiments()[name], setting) for name in names]


def test_results_are_the_same_every_time(real_traces: Path) -> None:
    name = ["fast_fig15_pd_ratio"]
    once, again = (as_json(outcomes_of(name, real_traces), Setting()) for _ in range(2))
    assert once == again


HOLDS = {  # rows that must hold, by the start of their quantity: what the issue asks for and the simulator delivers
    "arxiv_fig12_long_contexts": [""],
    "arxiv_fig13_real_workload": [""],
    "arxiv_table1_hit_rate": [""],
    "arxiv_table3_overload": [""],
    "arxiv_fig08_schedulers": ["place", "mean TTFT, "],
    "fast_fig05_schedulers": [""],
    "fast_fig06_tbt_shares": ["conversation", "synthetic"],
    "fast_fig08_prefill_time": ["conversation s", "toolagent s", "synthetic s, vllm"],
    "fast_fig09_hit_by_capacity": ["conversation", "synthetic", "all"],
    "fast_fig10_local_global": [""],
    "fast_fig13_bandwidth": ["with transfer, 100 over 400"],
    "fast_fig15_pd_ratio": ["P of", "effective"],
}


@pytest.mark.slow
def test_what_holds_goes_on_holding(real_traces: Path) -> None:
    judged = 0
    for outcome in outcomes_of(list(HOLDS), real_traces):
        starts = tuple(HOLDS[outcome.experiment.name])
        rows = [row for row in outcome.result.rows if row.quantity.startswith(starts) and row.holds is not None]
        judged += len(rows)
        assert rows
        assert [row.quantity for row in rows if not row.holds] == [], outcome.experiment.name
    assert judged > 100


@pytest.mark.slow
def test_the_page_says_what_a_run_finds_and_every_row_is_a_number(real_traces: Path) -> None:
    outcomes = outcomes_of(list(experiments()), real_traces)
    written = re.split(r"^## (\w+)$", (page.DOCS / "reproduction.md").read_text(), flags=re.MULTILINE)
    sections = dict(zip(written[1::2], written[2::2], strict=True))
    assert set(experiments()) <= set(sections)
    for outcome in outcomes:
        name = outcome.experiment.name
        verdicts = re.findall(r"^\| (.+?) \|.*\| (holds|does not hold|context) \|", sections[name], flags=re.MULTILINE)
        assert dict(verdicts) == {row.quantity: VERDICTS[row.holds] for row in outcome.result.rows}, name
        quantities = [row.quantity for row in outcome.result.rows]
        assert len(set(quantities)) == len(quantities), outcome.experiment.name
        assert quantities
        assert all(row.ours == row.ours for row in outcome.result.rows), outcome.experiment.name
        assert outcome.result.panels, outcome.experiment.name
