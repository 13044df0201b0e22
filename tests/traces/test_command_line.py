"""`python -m traces` as a user runs it: output, exit codes, files, start-up time."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from traces import Trace, builtin, load, save, statistics_of
from traces.__main__ import main

from ..waiting import eventually

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in this process, through its real entry point: most tests need no other."""
    out, errors = io.StringIO(), io.StringIO()
    code = 0
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            main([str(a) for a in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return subprocess.CompletedProcess([str(a) for a in arguments], code, out.getvalue(), errors.getvalue())


def run_alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "traces", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "small.jsonl"
    save(builtin("conversation", n_requests=400), path)
    return path


def refused(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for part in parts:
        assert part in lines[0]


def test_info_json_is_the_only_thing_on_stdout(small: Path) -> None:
    result = run_alone("info", small, "--json", "-")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    want = statistics_of(load(small))
    assert want.lru_hit is not None
    for key in (
        "requests",
        "duration_s",
        "rate",
        "input_mean",
        "output_mean",
        "blocks_requested",
        "blocks_distinct",
        "never_reused_share",
        "lru_hit",
    ):
        assert figures[key] == getattr(want, key)
    assert list(figures["lru_hit"]) == ["1000", "10000", "30000", "50000", "100000", "inf"]


def test_info_json_of_a_trace_without_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4\n")
    figures = json.loads(run("info", path, "--json", "-").stdout)
    assert figures["lru_hit"] is None and figures["never_reused_share"] is None
    assert figures["rate"] is None


def test_info_of_a_builtin_workload_with_table_json_file_and_plot(tmp_path: Path) -> None:
    result = run("info", "builtin:synthetic", "--json", tmp_path / "s.json", "--plot", tmp_path / "s.png")
    assert result.returncode == 0, result.stderr
    assert "3,993" in result.stdout and "LRU hit rate" in result.stdout
    assert json.loads((tmp_path / "s.json").read_text())["requests"] == 3993
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_skipped_rows_are_shown(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(small.read_text() + '{"timestamp": 1}\n[]\n')
    refused(run("info", path), "line 401", "input_length", "--on-error skip")
    result = run("info", path, "--on-error", "skip")
    assert result.returncode == 0
    assert "skipped 2 bad rows" in result.stderr
    assert "line 401" in result.stderr and "line 402" in result.stderr
    assert "skipped rows" in result.stdout
    quiet = run("info", path, "--on-error", "skip", "--json", "-")
    assert json.loads(quiet.stdout)["skipped_rows"] == 2


def test_bad_input_is_one_line_and_exit_code_2(small: Path, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(bytes(range(256)))
    refused(run_alone("info", tmp_path / "absent"), "no such file", "absent")
    refused(run("info", tmp_path / "junk"), "unknown format", "junk")
    refused(run("info", tmp_path), "directory")
    refused(run("info", "builtin:nonsense"), "no built-in workload")
    refused(run("convert", small, tmp_path / "out.xlsx"), ".parquet")
    refused(run("convert", small, tmp_path / "no" / "out.parquet"), "cannot be written")
    refused(run("slice", small, tmp_path / "o.parquet", "--start", "1e9"), "no request")
    refused(run("slice", small, tmp_path / "o.parquet", "--speed-up", "0"), "speed-up")
    refused(run("slice", small, tmp_path / "o.parquet", "--reblock", "700"), "multiple")
    refused(run("synth", "nonsense", tmp_path / "o.parquet"), "no workload profile")
    refused(run("synth", "synthetic", tmp_path / "o.parquet", "--requests", "0"), "n_requests 0")
    refused(run("info", small, "--plot", tmp_path / "plot.docx"), "plot.docx")
    refused(run("download", "nonsense"), "no public trace", "conversation")
    assert not list(tmp_path.glob("o*"))


def test_usage_errors_exit_with_2() -> None:
    for arguments in (
        ["info"],
        ["nonsense"],
        ["info", "x", "--nonsense"],
        ["slice", "a", "b", "-q"],
    ):
        result = run(*arguments)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr and result.stderr


def test_convert_slice_synth_fit(small: Path, tmp_path: Path) -> None:
    trace = load(small)
    assert run("convert", small, tmp_path / "c.parquet", "--reblock", "1024").returncode == 0
    assert load(tmp_path / "c.parquet").checksum == trace.reblock(1024).checksum

    def sliced(*options: object) -> Trace:
        result = run("slice", small, tmp_path / "s.parquet", *options)
        assert result.returncode == 0, result.stderr
        return load(tmp_path / "s.parquet")

    assert sliced("--part", "test").checksum == trace.split().test.checksum
    assert sliced("--start", 9, "--stop", 60).checksum == trace.window(9, 60).checksum
    both = sliced("--jitter", 3, "--speed-up", 2)
    assert both.checksum == trace.jitter(3).speed_up(2).checksum

    result = run("fit", small, tmp_path / "p.yaml")
    assert result.returncode == 0, result.stderr
    for out in ("a.parquet", "b.parquet"):
        arguments = ("synth", tmp_path / "p.yaml", tmp_path / out, "--requests", 50, "--seed", 7)
        assert run(*arguments).returncode == 0
    again = load(tmp_path / "a.parquet")
    assert again.n_requests == 50
    assert again.checksum == load(tmp_path / "b.parquet").checksum


def test_help_teaches_and_is_quick() -> None:
    best = float("inf")
    for _ in range(3):
        before = os.times()
        result = run_alone("--help")
        after = os.times()
        # CPU time of the child: what else the machine does must not count.
        spent = after.children_user - before.children_user
        best = min(best, spent + after.children_system - before.children_system)
    assert result.returncode == 0
    assert best < 1.0
    for word in ("Examples:", "builtin:conversation", "info", "convert", "slice", "download"):
        assert word in result.stdout
    for command in ("info", "convert", "slice", "synth", "fit", "download"):
        text = run(command, "--help").stdout
        assert "Example" in text and f"python -m traces {command}" in text


def test_import_is_cheap() -> None:
    code = (
        "import sys, time; start = time.process_time(); import traces; "
        "took = time.process_time() - start; "
        "heavy = {'numba', 'pyarrow', 'matplotlib', 'rich', 'scipy', 'pydantic'} & set(sys.modules); "
        "print(took, *sorted(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    took, *heavy = result.stdout.split()
    assert float(took) < 0.15
    assert heavy == []


def test_reading_needs_no_numba() -> None:
    code = (
        "import sys, traces; traces.Trace; traces.load; print({'numba', 'pyarrow', 'rich', 'scipy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "set()"


def test_a_closed_pipe_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "traces", "info", "builtin:synthetic", "--json", "-"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    process.wait(60)
    assert "Traceback" not in errors


def cpu_seconds(process: int) -> float:
    """Of a process that may have ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return math.inf
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_ctrl_c_is_quiet(tmp_path: Path) -> None:
    out = tmp_path / "big.parquet"
    process = subprocess.Popen(
        [sys.executable, "-m", "traces", "synth", "conversation", out, "--requests", "3000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    eventually(lambda: cpu_seconds(process.pid) > 4.0, 120.0)  # past all imports, however busy the machine is
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 130
    assert errors.strip() == "interrupted"
    assert not list(tmp_path.iterdir())
