"""The live state's book-keeping: whatever happens to reservations, it says what a recount of them says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.spec import load_cluster
from envs.state import PENDING, ROW_BITS, Source
from runtime.block_hash import hash_blocks
from runtime.live_state import LiveState, Reservation, Stage
from runtime.telemetry import EngineMetrics
from runtime.workers import Role, Worker, named_after_pools, resized

SPEC = load_cluster("3p1d").model_copy(update={"block_tokens": 16})


CHUNKED = SPEC.prefill[0].profile.prefill.model_copy(update={"chunk_tokens": 256})


def cluster(prefills: int = 3, decodes: int = 2, coupled: int = 0, spec=SPEC):
    workers = [Worker(id=f"p{i}", role=Role.PREFILL) for i in range(prefills)]
    workers += [Worker(id=f"d{i}", role=Role.DECODE) for i in range(decodes)]
    workers += [Worker(id=f"b{i}", role=Role.BOTH) for i in range(coupled)]
    return resized(spec, tuple(workers))


def made(**options):
    return LiveState(cluster(**options), blocks=4096, in_flight=64)


def admit(state: LiveState, name: str, tokens: np.ndarray, now_s: float, p=0, d=0, source=Source.LOCAL, **fields):
    """Admit a request to a place of one's own choosing."""
    known, hashes = state.index.find_tokens(tokens)
    state.observe(len(tokens), known, now_s, 30.0, 0.1)
    holder = state.observer.holder(p) if source == Source.FETCH else -1
    reservation = Reservation(
        name, p, d, source, holder, len(tokens), now_s, 0.0, 1.0, 0.05, 30.0, 0.1, 60.0, now_s + 60.0, True
    )
    for field, value in fields.items():
        setattr(reservation, field, value)
    state.admit(reservation, hashes, known)
    return reservation


def recount(state: LiveState) -> None:
    """Every figure of the state from the reservations alone."""
    state.count_blocks()
    reservations = list(state.reservations.values())
    assert len(state.flying) == len(reservations) == int(state.clock["in_flight"])
    assert {id(r) for r in state.flying} == {id(r) for r in reservations}
    for slot, reservation in enumerate(state.flying):
        assert reservation.flight == slot
        assert state.flight[slot]["decode"] == reservation.decode
        assert state.flight[slot]["tokens"] == reservation.input_tokens
    for p, row in enumerate(state.prefill):
        queued = [r for r in reservations if r.prefill == p and r.stage == Stage.QUEUED]
        running = [r for r in reservations if r.prefill == p and r.stage == Stage.PREFILL]
        assert set(map(id, state.queues[p])) == set(map(id, queued))
        assert row["queue_requests"] == len(queued) + state.external_prefill[p].queue_requests
        wanted_s = sum(r.predicted_s for r in queued) + state.external_prefill[p].queue_s
        assert row["queued_s"] == pytest.approx(wanted_s, abs=1e-9)
        # more than one runs where an engine says it has started on another: it batches prefills
        assert state.running[p] is None or state.running[p] in running
        sending = [r for r in reservations if r.prefill == p and r.stage in (Stage.PREFILL, Stage.TRANSFER)]
        fetching = [r for r in reservations if r.holder == p and r.fetching]
        assert row["tx_flows"] == len(sending) + len(fetching)
        assert row["rx_flows"] == sum(r.prefill == p and r.fetching > 0 for r in reservations)
        assert row["host_used"] == state.index.host_used[p] + sum(r.fetching for r in reservations if r.prefill == p)
        word, bit = divmod(p, ROW_BITS)
        pending = (state.observer.state.blocks[:, word] >> (ROW_BITS * PENDING + bit)) & 1
        expected = {int(b) for r in reservations if r.prefill == p and r.stage <= Stage.PREFILL for b in r.blocks}
        assert set(np.flatnonzero(pending)) <= expected
    for d, row in enumerate(state.decode):
        here = [r for r in reservations if r.decode == d]
        assert row["pending_requests"] == sum(r.stage < Stage.DECODE for r in here)
        assert row["pending_tokens"] == sum(r.input_tokens for r in here if r.stage < Stage.DECODE)
        assert row["waiting_requests"] == sum(r.stage == Stage.WAITING for r in here)
        assert row["waiting_tokens"] == sum(r.input_tokens for r in here if r.stage == Stage.WAITING)
        assert row["batch"] == sum(r.stage == Stage.DECODE for r in here) + state.external_decode[d].batch
        assert row["kv_tokens"] >= 0.0
        assert row["rx_flows"] == sum(r.stage in (Stage.PREFILL, Stage.TRANSFER) for r in here)


STEPS = (
    *("admit", "fetch", "started", "landed", "done", "ready", "joined"),
    *("finished", "failed", "wait", "metrics", "move"),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5), st.integers(0, 7), st.booleans()), max_size=60),
    st.integers(0, 1),
)
def test_whatever_is_reported_the_books_balance(steps, coupled):
    state = made(coupled=coupled)
    now_s, number = 0.0, 0
    for step, which, size, reported in steps:
        held = list(state.reservations.values())
        chosen = held[which % len(held)] if held else None
        now_s += 0.01
        if step in ("admit", "fetch"):
            number += 1
            p = which % len(state.prefills)
            d = int(state.twin[p]) if state.twin[p] >= 0 else which % 2
            source = Source.FETCH if step == "fetch" else Source(size % 2 * 2)
            tokens = np.arange(5 + 40 * size, dtype=np.uint32) + which % 2
            if source == Source.FETCH and state.observer.holder(p) in (-1, p):
                source = Source.LOCAL
            if source == Source.FETCH:
                state.index.store(  # so that there is something to fetch
                    (p + 1) % len(state.prefills), 0, hash_blocks(tokens, 16)
                )
                known, _ = state.index.find_tokens(tokens)
                state.observe(len(tokens), known, now_s, 30.0, 0.1)
                holder = state.observer.holder(p)
                if holder < 0 or state.observer.match[1, holder] <= state.observer.match[0, p]:
                    source = Source.LOCAL
            admit(state, str(number), tokens, now_s, p, d, source, reported=reported)
        elif step == "wait":
            now_s += size * 5.0
            state.advance(now_s)
        elif step == "metrics":
            names = [worker.id for worker in state.cluster.workers]
            metrics = EngineMetrics(at_s=now_s, waiting=size, running=which, kv_usage=0.1 * size)
            state.engine_metrics(names[which % len(names)], metrics)
        elif chosen is not None:
            if step == "started":
                state.prefill_started(chosen, now_s, now_s + size)
            elif step == "landed":
                state.fetch_landed(chosen)
            elif step == "done":
                state.prefill_done(chosen, now_s)
            elif step == "ready":
                state.kv_ready(chosen)
            elif step == "joined":
                state.joined([chosen], now_s)
            elif step == "finished":
                state.finished(chosen, now_s, output_tokens=1 + size, tbt_s=0.01 * size)
            elif step == "failed":
                state.end(chosen, "prefill", now_s)
            elif step == "move" and not coupled:
                state.move(chosen, which % 2)
        recount(state)
    for chosen in list(state.reservations.values()):
        state.end(chosen, "cancelled", now_s)
    recount(state)
    assert not state.reservations
    assert not (state.decode["pending_tokens"] != 0).any()
    assert np.allclose(state.prefill["tx_backlog_bytes"], 0.0, atol=1.0)


def test_a_lease_ends_by_itself_and_reports_renew_it():
    ended = []
    state = LiveState(cluster(), blocks=256, in_flight=8, on_end=ended.append)
    tokens = np.arange(100, dtype=np.uint32)
    silent = admit(state, "silent", tokens, 0.0, expires_s=10.0, lease_s=10.0)
    heard = admit(state, "heard", tokens, 0.0, expires_s=10.0, lease_s=10.0)
    state.advance(9.0)
    state.renew(heard, 9.0)
    state.advance(11.0)
    assert (silent.end, heard.end) == ("expired", "")
    assert state.expired == 1
    state.advance(20.0)
    assert heard.end == "expired"
    assert [r.request_id for r in ended] == ["silent", "heard"]
    recount(state)


def test_what_nobody_reports_goes_by_the_prediction():
    state = made()
    reservation = admit(state, "a", np.arange(1000, dtype=np.uint32), 0.0, reported=False, expires_s=500.0)
    assert reservation.stage == Stage.PREFILL
    state.advance(reservation.predicted_s + 1e-6)
    assert reservation.stage == Stage.TRANSFER
    state.advance(reservation.predicted_s + 1.0)
    assert reservation.stage == Stage.DECODE
    assert state.decode["batch"][0] == 1
    state.advance(reservation.join_s + float(state.clock["expected_decode_s"]) + 1e-6)
    assert reservation.end == "finished"
    recount(state)


def test_prefills_of_one_instance_run_one_after_the_other():
    state = made()
    first = admit(state, "1", np.arange(2000, dtype=np.uint32), 0.0)
    second = admit(state, "2", np.arange(5000, 9000, dtype=np.uint32), 0.0)
    assert (first.stage, second.stage) == (Stage.PREFILL, Stage.QUEUED)
    assert state.prefill["queued_s"][0] == pytest.approx(second.predicted_s)
    state.prefill_done(first, 1.0)
    assert second.stage == Stage.PREFILL
    assert state.prefill["running_end_s"][0] == pytest.approx(1.0 + second.predicted_s)


GROUPS = load_cluster("3p1d").model_copy(
    update={
        "block_tokens": 16,
        "prefill": (SPEC.prefill[0].model_copy(update={"pipeline_nodes": 4, "times": CHUNKED}),),
    }
)


@pytest.mark.parametrize("reported", [True, False])
def test_a_pipelined_group_takes_the_next_prefill_while_one_drains(reported):
    state = LiveState(cluster(spec=GROUPS), blocks=4096, in_flight=64)
    first = admit(state, "1", np.arange(2000, dtype=np.uint32), 0.0, reported=reported, expires_s=500.0)
    second = admit(state, "2", np.arange(5000, 5500, dtype=np.uint32), 0.0, reported=reported, expires_s=500.0)
    assert (first.stage, second.stage) == (Stage.PREFILL, Stage.QUEUED)
    assert 0.0 < second.drain_s == first.drain_s  # behind the longest chunk of the first
    state.advance(first.predicted_s + 1e-9)
    assert (first.stage, second.stage) == (Stage.PREFILL, Stage.PREFILL)
    assert state.running[0] is second
    assert state.prefill["running_end_s"][0] == pytest.approx(first.predicted_s + second.predicted_s)
    recount(state)
    state.engine_metrics("p0", EngineMetrics(at_s=0.0, waiting=0, running=2))
    assert state.external_prefill[0].queue_requests == 0  # both are ours
    if reported:
        state.prefill_done(first, first.predicted_s + first.drain_s)
    else:
        state.advance(first.predicted_s + first.drain_s + 1e-9)
    assert (first.stage, second.stage) == (Stage.TRANSFER, Stage.PREFILL)
    assert first.ttft_s == pytest.approx(first.predicted_s + first.drain_s)
    state.advance(first.predicted_s + second.predicted_s + 1e-9)
    assert state.prefill["running"][0] == 0
    recount(state)


def test_a_burst_sees_its_own_first_half():
    """Peers herd on stale metrics; here each decision is entered before the next is made."""
    state = made()
    tokens = np.arange(8000, dtype=np.uint32)
    queues = []
    for i in range(3):
        known, _ = state.index.find_tokens(tokens + 10000 * i)
        observation = state.observe(8000, known, 0.0, 30.0, 0.1)
        queues.append(observation.prefill["queue_s"][0].copy())
        admit(state, str(i), tokens + 10000 * i, 0.0, p=int(queues[-1].argmin()))
    assert (queues[0] == 0).all()
    assert (queues[1] > 0).sum() == 1
    assert (queues[2] > 0).sum() == 2


def test_metrics_show_what_is_not_ours():
    state = made()
    state.engine_metrics("p1", EngineMetrics(at_s=0.0, waiting=3, running=1))
    state.engine_metrics("d1", EngineMetrics(at_s=0.0, running=5, kv_usage=0.5))
    known, _ = state.index.find_tokens(np.arange(64, dtype=np.uint32))
    observation = state.observe(64, known, 0.0, 30.0, 0.1)
    assert observation.prefill["queue_s"][0, 1] > 0.0
    assert observation.prefill["queue_s"][0, 0] == 0.0
    assert observation.decode["batch"][0].tolist() == [0.0, 5.0]
    capacity = state.observer.parameters.decode["kv_capacity_tokens"][1]
    assert observation.decode["kv_tokens"][0, 1] == pytest.approx(0.5 * capacity)
    state.engine_metrics("p1", EngineMetrics(at_s=1.0, waiting=0, running=0))
    state.engine_metrics("d1", EngineMetrics(at_s=1.0, running=0, kv_usage=0.0))
    recount(state)
    assert state.prefill["queued_s"][1] == 0.0
    assert state.decode["batch"][1] == 0


def test_workers_come_and_go():
    state = made()
    tokens = np.arange(640, dtype=np.uint32)
    state.index.store(2, 0, hash_blocks(tokens, 16))
    kept = admit(state, "kept", tokens, 0.0, p=2, d=1)
    lost = admit(state, "lost", tokens, 0.0, p=0, d=0)
    workers = (
        *(w for w in state.cluster.workers if w.id != "p0"),
        Worker(id="p9", role=Role.PREFILL),
    )
    assert state.change_cluster(resized(state.spec, workers)) == [lost]
    assert [w.id for w in state.prefills] == ["p1", "p2", "p9"]
    assert state.prefills[kept.prefill].id == "p2"
    known, _ = state.index.find_tokens(tokens)
    state.observe(640, known, 0.0, 30.0, 0.1)
    assert state.observer.match[1].tolist() == [0, 40, 0]
    recount(state)
    state.finished(kept, 1.0, output_tokens=10)
    recount(state)


def test_a_worker_that_is_down_is_not_chosen():
    state = made()
    state.mark("p1", False)
    state.mark("d0", False)
    observation = state.observe(10, np.zeros(0, np.int32), 0.0, 30.0, 0.1)
    assert observation.prefill_mask[0, :, 0].tolist() == [1, 0, 1]
    assert observation.decode_mask[0].tolist() == [0, 1]
    observation = state.observe(10, np.zeros(0, np.int32), 0.0, 30.0, 0.1, candidates=[0])
    assert observation.decode_mask[0].tolist() == [0, 0]
    state.mark("d1", False)  # nobody is left: then anybody is better than nobody
    assert state.panic == "decode"
    assert state.observe(10, np.zeros(0, np.int32), 0.0, 30.0, 0.1).decode_mask[0].tolist() == [1, 1]
    state.mark("d0", True)
    assert state.panic == ""
    assert state.observe(10, np.zeros(0, np.int32), 0.0, 30.0, 0.1).decode_mask[0].tolist() == [1, 0]
    state.mark("d1", True)
    assert state.observe(10, np.zeros(0, np.int32), 0.0, 30.0, 0.1).decode_mask[0].tolist() == [1, 1]


def test_pools_named_after_the_spec():
    live = named_after_pools(load_cluster("2p2d"))
    assert [w.id for w in live.prefills] == ["prefill-0", "prefill-1"]
    assert math.isclose(len(live.decodes), 2)
