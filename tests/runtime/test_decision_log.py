"""The decision log: what goes in comes out, as a trace and as evidence, whatever happens to the disk."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces
from envs.simulator import Simulator
from envs.spec import ClusterSpec, load_cluster
from envs.state import Observation, Source, Status
from policies import make_policy
from runtime import decision_log
from runtime.decision_log import BUFFERS, DecisionLog, Ended, LogRow, pack, read_log
from traces import Trace, TraceError
from traces.formats.parquet import LOG_KEY
from traces.trace import densify

ROOT = Path(__file__).parents[2]

# --- a simulated cluster whose decisions and outcomes go to a decision log, as a live one's do ----------------------

Choose = Callable[[Observation], tuple[int, float, str]]
"""From an observation to an action, its probability, and who decided."""
ENDED = {
    Status.COMPLETED: Ended.COMPLETED,
    Status.REJECTED_AT_ARRIVAL: Ended.REJECTED_AT_ARRIVAL,
    Status.REJECTED_AT_DECODE: Ended.REJECTED_AT_DECODE,
}


def always(name: str) -> Choose:
    """A deterministic policy by name."""
    policy = make_policy(name)
    policy.reset(1, 0)
    return lambda observation: (int(policy.decide(observation)[0]), 1.0, name)


def explore(name: str, epsilon: float, seed: int) -> Choose:
    """With probability `epsilon` any pair of instances (or rejection), else what the named policy says."""
    policy = make_policy(name)
    policy.reset(1, 0)
    rng = np.random.default_rng(seed)

    def choose(observation: Observation) -> tuple[int, float, str]:
        prefills, decodes = observation.prefill.shape[1], observation.decode.shape[1]
        options = [0, *(1 + 3 * pair for pair in range(prefills * decodes))]  # source local
        own = int(policy.decide(observation)[0])
        action = int(rng.choice(options)) if rng.random() < epsilon else own
        propensity = (1 - epsilon) * (action == own) + epsilon * (action in options) / len(options)
        return action, float(propensity), name

    return choose


def canary(name: str, other: str, share: float, seed: int) -> Choose:
    """`other` decides for a share of requests; the propensity is that of the action, whoever took it."""
    policies = [make_policy(name), make_policy(other)]
    for policy in policies:
        policy.reset(1, 0)
    rng = np.random.default_rng(seed)

    def choose(observation: Observation) -> tuple[int, float, str]:
        actions = [int(policy.decide(observation)[0]) for policy in policies]
        drawn = int(rng.random() < share)
        chances = (1 - share, share)
        propensity = sum(c for c, action in zip(chances, actions, strict=True) if action == actions[drawn])
        return actions[drawn], propensity, (name, other)[drawn]

    return choose


def rows_of(
    trace: Trace, cluster: str | ClusterSpec, choose: Choose, *, recheck: bool | None = None, observations: bool = True
) -> tuple[list[LogRow], Any]:
    """A log row for each request of a replay, in order of arrival, and the simulator's outcomes."""
    spec = load_cluster(cluster)
    simulator = Simulator.for_trace(spec, trace)
    simulator.begin(0, recheck=recheck)
    prefills, decodes = simulator.prefills, simulator.decodes
    rows: list[LogRow] = []
    while simulator.observe(0):
        i = len(rows)
        observation = simulator.observation_tables
        action, propensity, policy = choose(observation)
        pair, source = divmod(action - 1, 3)
        prefill, decode = divmod(pair, decodes) if action else (-1, -1)
        rows.append(
            LogRow(
                request_id=f"request-{i}",
                arrival_s=float(trace.arrival_s[i]),
                input_tokens=int(trace.input_tokens[i]),
                action=action,
                block_ids=hashed(trace.blocks(i)),
                expected_output_tokens=float(observation.cluster["expected_output_tokens"][0, 0]),
                tenant="" if trace.tenant_id is None else f"tenant-{trace.tenant_id[i]}",
                session="" if trace.session_id is None else f"session-{trace.session_id[i]}",
                policy=policy,
                propensity=propensity,
                prefill=f"prefill-{prefill}" if action else "",
                decode=f"decode-{decode}" if action else "",
                ttft_slo_s=spec.slo.ttft_s,
                tbt_slo_s=spec.slo.tbt_s,
                prefills=prefills,
                decodes=decodes,
                observation=pack(observation) if observations else None,
            )
        )
        simulator.decide(0, prefill, decode, Source(source) if action else Source.LOCAL)
    outcomes = simulator.outcomes(0).copy()
    for i, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
        row.status = ENDED[Status(int(outcome["status"]))]
        for label in ("predicted_ttft_s", "predicted_tbt_s", "ttft_s", "tbt_s", "prefill_s"):
            setattr(row, label, float(outcome[label]))
        if row.status == Ended.COMPLETED:
            row.output_tokens = int(trace.output_tokens[i])
    return rows, outcomes


def hashed(ids: np.ndarray) -> np.ndarray:
    """64-bit numbers in place of dense ones, as chained hashes are."""
    return (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)


def ended_order(rows: Sequence[LogRow], outcomes: Any) -> list[LogRow]:
    """Rows in the order in which their requests ended, as a live cluster would record them."""
    end_s = [
        o["finish_s"] if math.isfinite(o["finish_s"]) else max(o["arrival_s"], np.nan_to_num(o["kv_ready_s"]))
        for o in outcomes
    ]
    return [rows[i] for i in np.argsort(end_s, kind="stable")]


def write(folder: Path, rows: Sequence[LogRow], cluster: str | ClusterSpec = "2p2d", **options: Any) -> DecisionLog:
    """Log rows and close; waits for each segment, as requests that come at a human pace would."""
    spec = load_cluster(cluster)
    with DecisionLog(folder, spec.block_tokens, "live", cluster=spec, clock=lambda: 0.0, **options) as log:
        for i, row in enumerate(rows, start=1):
            log.record(row)
            if i % options.get("max_rows", 100_000) == 0:
                log.flush()
    return log


# --- fixtures ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traces.builtin("conversation", n_requests=600).speed_up(4)


@pytest.fixture(scope="module")
def replayed(trace: Trace) -> tuple[list[LogRow], Any]:
    return rows_of(trace, "2p2d", always("conductor"))


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("decisions-*.parquet"))


def plain(i: int = 0, **given: Any) -> LogRow:
    """A row without an observation."""
    return LogRow(request_id=f"r{i}", arrival_s=float(i), input_tokens=600, output_tokens=3, **given)


# --- as a trace ------------------------------------------------------------------------------------------------


def test_reads_back_as_the_trace(trace: Trace, replayed: tuple[list[LogRow], Any], tmp_path: Path) -> None:
    rows, outcomes = replayed
    log = write(tmp_path, ended_order(rows, outcomes), max_rows=130)
    assert (log.rows_written, log.rows_dropped, log.rows_refused, log.rows_pending) == (600, 0, 0, 0)
    assert log.segments_written == len(segments(tmp_path)) == 5
    back = traces.load(tmp_path)
    assert np.array_equal(back.arrival_s, trace.arrival_s)
    assert np.array_equal(back.input_tokens, trace.input_tokens)
    assert np.array_equal(back.block_offsets, trace.block_offsets)
    assert np.array_equal(back.block_ids, trace.block_ids)
    assert (back.name, back.block_tokens) == ("live", 512)
    completed = outcomes["status"] == 3
    assert 0 < completed.sum() < 600
    assert np.array_equal(back.output_tokens[completed], trace.output_tokens[completed])
    assert (back.output_tokens >= 1).all()
    for label in ("session_id", "tenant_id"):
        ours, theirs = getattr(back, label), getattr(trace, label)
        if theirs is not None:
            assert np.array_equal(densify(ours), densify(theirs))
    pattern = traces.load(str(tmp_path / "decisions-*.parquet"))
    assert pattern.checksum == back.checksum == traces.load(segments(tmp_path)).checksum


def test_one_segment_is_a_trace(replayed: tuple[list[LogRow], Any], tmp_path: Path) -> None:
    write(tmp_path, replayed[0][:50][::-1])
    (file,) = segments(tmp_path)
    assert traces.load(file).checksum == traces.load(tmp_path).checksum
    info = [sys.executable, "-m", "traces", "info", str(tmp_path), "--json", "-"]
    done = subprocess.run(info, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["requests"] == 50


def test_blocks_are_the_same_over_segments(tmp_path: Path) -> None:
    hashes = np.array([2**64 - 1, 2**63 + 5, 7], np.uint64)
    rows = [plain(i, block_ids=hashes[:n]) for i, n in enumerate((1, 2, 2, 1))]
    write(tmp_path, rows, max_rows=1)
    back = traces.load(tmp_path)
    assert [list(back.blocks(i)) for i in range(4)] == [[0], [0, 1], [0, 1], [0]]


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_any_requests_come_back(data: st.DataObject) -> None:
    """In any order of ending, cut into segments anywhere: the requests in order, equal blocks equal."""
    tokens = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
    arrivals = sorted(data.draw(st.lists(st.floats(0, 1e6), min_size=len(tokens), max_size=len(tokens))))
    rows = []
    for arrival_s, n in zip(arrivals, tokens, strict=True):
        ids = data.draw(st.lists(st.sampled_from([0, 1, 2**62, 2**63, 2**64 - 1]), max_size=-(-n // 512)))
        rows.append(LogRow("r", arrival_s, n, output_tokens=n, block_ids=np.array(ids, np.uint64)))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), data.draw(st.permutations(rows)), max_rows=data.draw(st.integers(8, 30)))
        back = traces.load(folder)
    assert back.arrival_s.tolist() == arrivals
    assert back.input_tokens.tolist() == back.output_tokens.tolist() == tokens
    ids = [int(i) % 2**63 for row in rows for i in (row.block_ids if row.block_ids is not None else ())]
    assert np.array_equal(back.block_ids, densify(np.array(ids, np.int64)))


def test_equal_arrivals_are_in_order_of_decision(tmp_path: Path) -> None:
    """Rows are numbered as they are made, and recorded when their requests end."""
    rows = [LogRow("a", 1.0, 10 + i, output_tokens=1) for i in range(6)]
    write(tmp_path, [rows[i] for i in (4, 0, 5, 2, 1, 3)], max_rows=2)
    assert list(traces.load(tmp_path).input_tokens) == list(range(10, 16))


def test_sessions_and_tenants_by_name(tmp_path: Path) -> None:
    given = [("s1", "a"), ("", "b"), ("", "a"), ("s1", "b")]
    write(tmp_path, [plain(i, session=s, tenant=t) for i, (s, t) in enumerate(given)], max_rows=2)
    back = traces.load(tmp_path)
    assert back.session_id is not None and back.tenant_id is not None
    assert list(densify(back.session_id)) == [0, 1, 2, 0]
    assert list(densify(back.tenant_id)) == [0, 1, 0, 1]
    assert list(read_log(tmp_path).columns["tenant"]) == ["a", "b", "a", "b"]


def test_no_sessions_at_all(tmp_path: Path) -> None:
    write(tmp_path, [plain(i) for i in range(3)])
    assert traces.load(tmp_path).session_id is None


def test_unknown_output_is_what_was_expected(tmp_path: Path) -> None:
    rows = [
        LogRow("a", 0.0, 5, status=Ended.REJECTED_AT_ARRIVAL, expected_output_tokens=256.4),
        LogRow("b", 1.0, 5, status=Ended.FAILED, expected_output_tokens=float("nan")),
        LogRow("c", 2.0, 5, status=Ended.COMPLETED, output_tokens=9),
    ]
    write(tmp_path, rows)
    log = read_log(tmp_path)
    assert list(log.trace.output_tokens) == [256, 1, 9]
    assert list(log.columns["output_known"]) == [False, False, True]


def test_a_restart_goes_on_by_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for started in (1000.0, 1500.0):
        monkeypatch.setattr(decision_log.time, "time", lambda s=started: s)
        with DecisionLog(tmp_path, 512, "live", clock=lambda: 100.0) as log:
            log.record(LogRow("r", 101.0, 10, output_tokens=1))
    assert list(traces.load(tmp_path).arrival_s) == [101.0, 601.0]
    assert list(read_log(tmp_path).logged.arrival_s) == [101.0, 601.0]


# --- as evidence -----------------------------------------------------------------------------------------------


def test_all_columns_come_back(replayed: tuple[list[LogRow], Any], tmp_path: Path) -> None:
    rows, outcomes = replayed
    write(tmp_path, ended_order(rows, outcomes), max_rows=100)
    log = read_log(tmp_path)
    for label in ("request_id", "arrival_s", "action", "policy", "propensity", "prefill", "decode", "prefills"):
        assert list(log.columns[label]) == [getattr(row, label) for row in rows], label
    for label in ("predicted_ttft_s", "ttft_s", "tbt_s", "prefill_s", "ttft_slo_s"):
        assert np.array_equal(log.columns[label], [getattr(row, label) for row in rows], equal_nan=True), label
    assert list(log.columns["status"]) == [row.status.name.lower() for row in rows]
    assert np.array_equal(log.logged.good, outcomes["good"])
    names = ["local", "fetch", "recompute"]
    assert list(log.columns["source"]) == [names[(row.action - 1) % 3] if row.action else "" for row in rows]
    assert log.cluster is not None and log.cluster["name"] == "2p2d"


def test_observations_come_back_bit_for_bit(replayed: tuple[list[LogRow], Any], tmp_path: Path) -> None:
    rows, outcomes = replayed
    write(tmp_path, ended_order(rows, outcomes), max_rows=77)
    (group,) = read_log(tmp_path).logged.observed
    assert list(group.rows) == list(range(600))
    assert [pack(group.observation, k) for k in range(600)] == [row.observation for row in rows]


def test_pools_that_change_size(trace: Trace, tmp_path: Path) -> None:
    few = trace.rows(0, 40)
    small, large = (rows_of(few, name, always("cache_aware"))[0] for name in ("2p2d", "5p3d"))
    mixed = [row for pair in zip(small[::2], large[1::2], strict=True) for row in pair]
    mixed += [plain(10_000)]
    for i, row in enumerate(mixed):
        row.sequence = i
    write(tmp_path, mixed)
    log = read_log(tmp_path)
    found = {group.observation.prefill.shape: group for group in log.logged.observed}
    assert set(found) == {(20, 2), (20, 5)}
    for shape, first, rows in (((20, 2), 0, small), ((20, 5), 1, large)):
        group = found[shape]
        assert list(group.rows) == list(range(first, 40, 2))
        assert [pack(group.observation, k) for k in range(20)] == [rows[i].observation for i in group.rows]
    assert list(log.logged.seen) == [True] * 40 + [False]


def test_without_observations(replayed: tuple[list[LogRow], Any], tmp_path: Path) -> None:
    write(tmp_path, replayed[0][:20], observations=False)
    log = read_log(tmp_path)
    assert log.logged.observed == () and log.trace.n_requests == 20


def test_metadata(tmp_path: Path) -> None:
    before = time.time()
    write(tmp_path, [plain()])
    head = json.loads(pq.read_schema(segments(tmp_path)[0]).metadata[LOG_KEY])
    assert before <= head["started_unix_s"] <= time.time()
    assert head["observation"]["sha256"] == decision_log.observation_schema()["sha256"]
    assert head["format"] == decision_log.FORMAT


@pytest.mark.parametrize(
    ("row", "good"),
    [
        ({"status": Ended.COMPLETED, "ttft_s": 1.0, "tbt_s": 0.1}, 1.0),
        ({"status": Ended.COMPLETED, "ttft_s": 1.1, "tbt_s": 0.1}, 0.0),
        ({"status": Ended.COMPLETED, "ttft_s": 1.0, "tbt_s": 0.2}, 0.0),
        ({"status": Ended.COMPLETED}, float("nan")),
        ({"status": Ended.COMPLETED, "good": True}, 1.0),
        ({"status": Ended.EXPIRED}, float("nan")),
        ({"status": Ended.FAILED}, 0.0),
        ({"status": Ended.REJECTED_AT_ARRIVAL}, 0.0),
    ],
)
def test_good_from_times_and_slos(row: dict[str, Any], good: float, tmp_path: Path) -> None:
    write(tmp_path, [plain(0, ttft_slo_s=1.0, tbt_slo_s=0.1, **row)])
    assert np.array_equal(read_log(tmp_path).logged.good, [good], equal_nan=True)


# --- rotation, pruning, bounds ---------------------------------------------------------------------------------


def test_rotation_by_bytes(tmp_path: Path) -> None:
    rows = [plain(i, block_ids=np.arange(2)) for i in range(10)]
    log = write(tmp_path, rows, max_bytes=64)
    assert log.segments_written + log.segments_failed >= 3
    assert log.rows_written + log.rows_dropped == 10


def test_rotation_by_age(tmp_path: Path) -> None:
    with DecisionLog(tmp_path, 512, "live", max_age_s=0.2) as log:
        log.record(plain())
        deadline = time.monotonic() + 10
        while not segments(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(segments(tmp_path)) == 1, "without a flush"
        assert log.flush(10)
        assert (log.rows_written, log.rows_pending, log.segments_written) == (1, 0, 1)


def test_pruning(tmp_path: Path) -> None:
    with DecisionLog(tmp_path, 512, "live", max_rows=10, keep_segments=3) as log:
        for i in range(70):
            log.record(plain(i))
            if i % 10 == 9:
                assert log.flush(10)
        assert log.segments_pruned == 4
    assert list(traces.load(tmp_path).arrival_s) == list(range(40, 70))
    size = segments(tmp_path)[-1].stat().st_size
    with DecisionLog(tmp_path, 512, "live", keep_bytes=size + 10) as log:
        log.record(plain(70))
        assert log.flush(10)
    assert len(segments(tmp_path)) == 1, "the newest always stays"


def test_numbers_go_on_where_a_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log.time, "time", lambda: 1.5e9)
    for _ in range(3):
        write(tmp_path, [plain()])
    assert len(segments(tmp_path)) == 3


def test_memory_is_bounded_and_the_caller_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    original = decision_log.write_segment

    def slow(*given: Any) -> None:
        assert go.wait(60)
        original(*given)

    monkeypatch.setattr(decision_log, "write_segment", slow)
    log = DecisionLog(tmp_path, 512, "live", max_rows=100)
    start = time.perf_counter()
    for i in range(100_000):
        log.record(plain(i))
    assert time.perf_counter() - start < 30
    assert log.rows_pending == BUFFERS * 100
    assert log.rows_dropped == 100_000 - BUFFERS * 100
    go.set()
    log.close()
    assert log.rows_written == BUFFERS * 100
    assert traces.load(tmp_path).n_requests == BUFFERS * 100


def test_many_rows(replayed: tuple[list[LogRow], Any], tmp_path: Path) -> None:
    """A buffer that was written is used again; its memory does not grow."""
    import psutil

    rows = replayed[0][:100]
    process = psutil.Process()
    with DecisionLog(tmp_path, 512, "live", max_rows=2000, max_bytes=4 << 20, keep_segments=4) as log:
        sizes = []
        for _ in range(20):
            for _ in range(20):
                for row in rows:
                    log.record(row)
            assert log.flush(30)
            sizes.append(process.memory_info().rss)
        assert log.rows_written == 40_000 and log.rows_dropped == 0
    assert sizes[-1] - sizes[4] < 64 << 20


def test_rows_that_cannot_be_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = [
        LogRow("a", float("nan"), 10),
        LogRow("a", -1.0, 10),
        LogRow("a", 0.0, 0),
        LogRow("a", 0.0, 2**40),
        LogRow("a", 0.0, 10, block_ids=np.arange(2)),
        LogRow("a", 0.0, 10, propensity=0.0),
        LogRow("a", 0.0, 10, prefills=2, decodes=2, observation=b"short"),
        LogRow("a", None, 10),  # type: ignore[arg-type]
    ]
    odd = [LogRow("\udcff", 1.0, 10, tenant="\udcfe"), LogRow(7, 2.0, 10)]  # type: ignore[arg-type]
    log = write(tmp_path, [*bad, *odd])
    assert (log.rows_refused, log.rows_written) == (len(bad), 2)
    assert len([r for r in caplog.records if "decision log" in r.message]) == 1
    assert list(read_log(tmp_path).columns["request_id"]) == ["?", "7"]


def test_after_close(tmp_path: Path) -> None:
    log = write(tmp_path, [plain()])
    log.record(plain(1))
    assert (log.rows_written, log.rows_dropped) == (1, 1)
    log.close()


@pytest.mark.parametrize("option", [{"max_rows": 0}, {"max_age_s": 0}, {"keep_segments": 0}, {"keep_bytes": 0}])
def test_impossible_options(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        DecisionLog(tmp_path, 512, "live", **option)


# --- a disk that fails, a process that dies ----------------------------------------------------------------------


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    original = pq.ParquetWriter.write_table
    full = True

    def failing(self: Any, *given: Any) -> None:
        original(self, *given)
        if full:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", failing)
    with DecisionLog(tmp_path, 512, "live", max_rows=10) as log:
        for attempt in range(3):
            for i in range(10):
                log.record(plain(i))
            assert log.flush(10)
            assert (log.rows_dropped, log.segments_failed) == (10 * attempt + 10, attempt + 1)
        assert "No space left" in log.last_error
        assert list(tmp_path.iterdir()) == []
        full = False
        log.record(plain(99))
        assert log.flush(10)
        assert log.rows_written == 1
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and "No space left" in said[0] and "30 rows were dropped" in said[1]
    assert traces.load(tmp_path).n_requests == 1


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """In a process that may write only files of 4 kB."""
    script = f"""
import resource, signal
from runtime.decision_log import DecisionLog, LogRow
import numpy as np
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = DecisionLog({str(tmp_path)!r}, 512, "live")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
rng = np.random.default_rng(0)
for i in range(3000):
    log.record(LogRow(f"r{{i}}", float(i), 600, block_ids=rng.integers(2**62, size=2)))
assert log.flush(30)
assert (log.rows_dropped, log.segments_failed) == (3000, 1), log.last_error
log.close()
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with DecisionLog(tmp_path / "file" / "log", 512, "live") as log:
        log.record(plain())
        assert log.flush(10)
        assert (log.rows_dropped, log.segments_failed) == (1, 1)


def test_folder_that_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with DecisionLog(folder, 512, "live") as log:
        folder.rmdir()
        log.record(plain())
        assert log.flush(10)
    assert len(segments(folder)) == 1


def test_killed_while_writing(tmp_path: Path) -> None:
    """What was a segment stays whole; what was not is swept away by the next start."""
    script = f"""
import sys, time
import pyarrow.parquet as pq
from runtime.decision_log import DecisionLog, LogRow
log = DecisionLog({str(tmp_path)!r}, 512, "live", max_rows=100)
for i in range(100):
    log.record(LogRow(f"r{{i}}", float(i), 600, output_tokens=2))
log.flush()
original = pq.ParquetWriter.write_table
def hang(self, *given):
    original(self, *given)
    print("writing", flush=True)
    time.sleep(600)
pq.ParquetWriter.write_table = hang
for i in range(100):
    log.record(LogRow(f"r{{i}}", float(i), 600))
time.sleep(600)
"""
    child = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "writing\n"
        assert len(list(tmp_path.glob(".*.unfinished"))) == 1
        with DecisionLog(tmp_path, 512, "another"):
            pass
        assert len(list(tmp_path.glob(".*.unfinished"))) == 1, "another process's, alive: left alone"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert len(list(tmp_path.glob(".*.unfinished"))) == 1
    assert traces.load(tmp_path).n_requests == 100
    with DecisionLog(tmp_path, 512, "live") as log:
        assert list(tmp_path.glob(".*.unfinished")) == []
        log.record(plain(1000))
    assert traces.load(tmp_path).n_requests == 101


def test_reading_while_writing(tmp_path: Path) -> None:
    """A reader sees whole segments only, and more each time; pruned ones are no error."""
    stop = threading.Event()
    with DecisionLog(tmp_path, 512, "live", max_rows=50, keep_segments=6) as log:

        def serve() -> None:
            i = 0
            while not stop.is_set():
                log.record(plain(i))
                i += 1
                if i % 50 == 0:
                    time.sleep(0.002)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            while log.segments_written < 1:
                time.sleep(0.01)
            last = -1.0
            for _ in range(20):
                arrivals = traces.load(tmp_path).arrival_s
                assert len(arrivals) % 50 == 0 and arrivals[-1] >= last
                last = float(arrivals[-1])
        finally:
            stop.set()
            thread.join()


def test_many_threads_record(tmp_path: Path) -> None:
    with DecisionLog(tmp_path, 512, "live", max_rows=400) as log:
        threads = [
            threading.Thread(target=lambda k=k: [log.record(plain(1000 * k + i)) for i in range(250)]) for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert log.rows_written == 1000
    assert len(np.unique(traces.load(tmp_path).arrival_s)) == 1000


# --- bad input -------------------------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="without session files or decision log segments"):
        read_log(tmp_path)
    with pytest.raises(TraceError, match="no file of that pattern"):
        read_log(tmp_path / "decisions-*.parquet")


def test_damaged_segment(tmp_path: Path) -> None:
    write(tmp_path, [plain(i) for i in range(20)], max_rows=10)
    file = segments(tmp_path)[0]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TraceError, match=f"{file.name}.*damaged Parquet"):
        read_log(tmp_path)


def test_another_observation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = decision_log.observation_schema() | {"cluster": ["arrival_rate"], "sha256": "0"}
    with monkeypatch.context() as patch:
        patch.setattr(decision_log, "observation_schema", lambda: theirs)
        write(tmp_path, [plain()])
    with pytest.raises(TraceError, match="another observation .different: cluster, sha256.*still loads as a trace"):
        read_log(tmp_path)
    assert traces.load(tmp_path).n_requests == 1


def test_a_trace_is_no_log(tmp_path: Path, trace: Trace) -> None:
    traces.save(trace, tmp_path / "a.parquet")
    with pytest.raises(TraceError, match="no decision log"):
        read_log(tmp_path / "a.parquet")
    traces.save(trace, tmp_path / "b.parquet")
    with pytest.raises(TraceError, match="not a segment of a decision log"):
        traces.load(tmp_path)


def test_segments_of_different_block_sizes(tmp_path: Path) -> None:
    for size in (512, 16):
        with DecisionLog(tmp_path, size, "live") as log:
            log.record(plain())
    with pytest.raises(TraceError, match="blocks of 16 tokens.*expected 512"):
        traces.load(tmp_path)


def test_segments_and_sessions_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path, [plain()])
    (tmp_path / "session.json").write_text("{}")
    with pytest.raises(TraceError, match=r"both .*parquet and session\.json"):
        traces.load(tmp_path)


def test_cost_of_a_record(replayed: tuple[list[LogRow], Any], tmp_path: Path) -> None:
    """10 µs are allowed on a quiet machine; this holds the order of magnitude on any."""
    rows = replayed[0]
    spent = []
    with DecisionLog(tmp_path, 512, "live") as log:
        for row in rows * 5:
            start = time.perf_counter()
            log.record(row)
            spent.append(time.perf_counter() - start)
    assert np.median(spent) < 50e-6


def test_spec_survives(tmp_path: Path) -> None:
    from envs.spec import validate_cluster

    write(tmp_path, [plain()], "8p8d")
    cluster = read_log(tmp_path).cluster
    assert cluster is not None
    assert validate_cluster(cluster, "log").checksum == load_cluster("8p8d").checksum
