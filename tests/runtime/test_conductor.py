"""The decision on live requests and what keeps it safe: wrong input, failing policies, tenants, changes in service."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from envs.spec import SpecError, load_cluster
from envs.state import Source
from policies import PolicyError
from runtime.block_hash import hash_blocks
from runtime.conductor import LONGEST_PROMPT, MOST_RETRY_S, Clock, Conductor
from runtime.fairness import TenantShares
from runtime.live_state import Stage
from runtime.prefix_index import Medium
from runtime.request import Assignment, Reason, Rejection, Request, RequestError
from runtime.telemetry import EngineMetrics
from runtime.workers import LiveCluster, Role, Worker, resized

from .failing_policies import Canary, Hanging, Scripted
from .test_live_state import recount

SPEC = load_cluster("3p1d").model_copy(update={"block_tokens": 16})
SCRIPTED = "tests.runtime.failing_policies:Scripted"
PATIENT = 60.0  # a deadline that a busy machine keeps


def cluster(prefills: int = 2, decodes: int = 2, coupled: int = 0) -> LiveCluster:
    kinds = (("p", Role.PREFILL, prefills), ("d", Role.DECODE, decodes), ("b", Role.BOTH, coupled))
    workers = [
        Worker(id=f"{letter}{i}", role=role, address=f"{letter}{i}:8000")
        for letter, role, count in kinds
        for i in range(count)
    ]
    return resized(SPEC, tuple(workers))


def made(policy: str = "conductor+predictive", live: LiveCluster | None = None, **options) -> Conductor:
    given = {"blocks": 4096, "in_flight": 256, "clock": Clock(external=True), "deadline_s": PATIENT} | options
    return Conductor(live or cluster(), policy, **given)


def prompt(length: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.uint32)


def admit(conductor: Conductor, name: str, **fields) -> Assignment:
    answer = conductor.schedule(Request(name, **({"tokens": prompt(100)} | fields)))
    assert isinstance(answer, Assignment), answer
    return answer


def refused(conductor: Conductor, name: str = "r", **fields) -> Rejection:
    answer = conductor.schedule(Request(name, **({"tokens": prompt(100)} | fields)))
    assert isinstance(answer, Rejection), answer
    return answer


def tables(conductor: Conductor) -> list[bytes]:
    """All of the state, to be compared."""
    state = conductor.state
    columns = state.observer.state
    return [table.tobytes() for table in (columns.clock, columns.prefill, columns.decode, columns.blocks, state.flight)]


@pytest.fixture
def scripted() -> Iterator[type[Scripted]]:
    yield Scripted
    Scripted.action = Canary.action = 1


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    yield Hanging.held
    Hanging.held.clear()


# --- where it goes ---------------------------------------------------------------------------------------------------


def test_a_cached_prefix_makes_its_holder_the_faster_one():
    conductor = made()
    tokens = prompt(3200)
    conductor.state.index.store(1, Medium.GPU, hash_blocks(tokens, 16))
    answer = admit(conductor, "a", tokens=tokens)
    assert answer.prefill.id == "p1"
    assert answer.source == Source.LOCAL
    assert answer.reused_tokens == 3199  # the last token is computed always
    seen = conductor.explained("a").observation.prefill[0]
    assert seen["ttft_local_s"][1] < 0.5 * seen["ttft_local_s"][0]
    assert seen["ttft_local_s"][0] == pytest.approx(seen["ttft_recompute_s"][0])
    assert answer.predicted_ttft_s == seen["ttft_local_s"][1]


@pytest.mark.parametrize("other", [{"lora_name": "adapter"}, {"cache_salt": "salt"}, {"namespace": "text"}])
def test_a_prefix_of_another_namespace_is_none(other):
    conductor = made()
    tokens = prompt(3200)
    conductor.state.index.store(1, Medium.GPU, hash_blocks(tokens, 16))
    assert admit(conductor, "a", tokens=tokens, **other).reused_tokens == 0


def test_hashes_are_as_good_as_tokens():
    conductor = made()
    hashes = hash_blocks(prompt(3200), 16)
    conductor.state.index.store(1, Medium.GPU, hashes)
    answer = admit(conductor, "a", tokens=None, hashes=hashes, input_tokens=3200)
    assert (answer.prefill.id, answer.reused_tokens) == ("p1", 3199)


def test_a_fetch_names_its_holder(scripted):
    conductor = made(SCRIPTED)
    tokens = prompt(3200)
    conductor.state.index.store(1, Medium.GPU, hash_blocks(tokens, 16))
    scripted.action = 1 + Source.FETCH
    answer = admit(conductor, "a", tokens=tokens)
    assert (answer.prefill.id, answer.source, answer.holder.id) == ("p0", Source.FETCH, "p1")
    assert conductor.state.reservations["a"].fetching == 200
    recount(conductor.state)


def test_other_pairs_are_named_and_differ():
    answer = admit(made(live=cluster(3, 3)), "a")
    pairs = [(answer.prefill.id, answer.decode.id), *((p.id, d.id) for p, d in answer.fallbacks)]
    assert len(set(pairs)) == len(pairs) == 3


def test_a_burst_is_spread():
    """Peers herd on the emptiest worker until its metrics say otherwise."""
    conductor = made(live=cluster(4, 4))
    chosen = [admit(conductor, str(i), tokens=prompt(4000, 9000 * i)) for i in range(40)]
    for pool in ("prefill", "decode"):
        names = [getattr(answer, pool).id for answer in chosen]
        assert all(5 <= names.count(name) <= 15 for name in set(names)), names
        assert len(set(names)) == 4


# --- requests that cannot be -----------------------------------------------------------------------------------------

NO_SECONDS = (0.0, -1.0, math.nan, math.inf)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokens": np.zeros(0, np.uint32)}, "input_tokens"),
        ({"tokens": None, "input_tokens": -5}, "input_tokens"),
        ({"tokens": None, "input_tokens": LONGEST_PROMPT + 1}, "input_tokens"),
        ({"tokens": None, "hashes": np.zeros(8, np.uint64), "input_tokens": 16 * 7}, "block_hashes"),
        ({"tenant": "x" * 257}, "tenant"),
        *(({name: value}, name) for name in ("lease_s", "ttft_slo_s", "tbt_slo_s") for value in NO_SECONDS[1:]),
    ],
)
def test_the_field_is_named(fields, named):
    conductor = made()
    before = tables(conductor)
    with pytest.raises(RequestError, match=f"^{named}"):
        conductor.schedule(Request("a", **({"tokens": prompt(100)} | fields)))
    assert tables(conductor) == before
    with pytest.raises(RequestError, match="request_id"):
        conductor.schedule(Request("a" * 257, tokens=prompt(100)))


def test_an_id_is_in_flight_once():
    conductor = made()
    admit(conductor, "a")
    with pytest.raises(RequestError, match="'a' is in flight"):
        admit(conductor, "a")
    conductor.release("a")
    admit(conductor, "a")
    recount(conductor.state)


def test_an_id_is_free_when_its_lease_has_ended():
    conductor = made(lease_s=5.0, in_flight=1)
    admit(conductor, "a", arrival_s=0.0)
    assert refused(conductor, "b", arrival_s=1.0).reason == Reason.QUEUE_FULL
    admit(conductor, "a", arrival_s=50.0)
    assert conductor.state.expired == 1


def test_what_no_worker_could_hold_is_too_large():
    conductor = made()
    largest = conductor.state.largest_context
    answer = refused(conductor, tokens=None, input_tokens=largest)
    assert (answer.reason, answer.reason.http_status) == (Reason.TOO_LARGE, 400)
    assert str(largest) in answer.message
    assert not conductor.state.reservations


def test_no_more_than_fit_are_in_flight():
    conductor = made("conductor+none", in_flight=3)
    for i in range(3):
        admit(conductor, str(i))
    answer = refused(conductor)
    assert (answer.reason, answer.reason.http_status) == (Reason.QUEUE_FULL, 503)
    assert answer.retry_after_s >= 1.0
    conductor.finished("1", output_tokens=3)
    admit(conductor, "again")
    recount(conductor.state)


def test_candidates_bound_the_choice():
    conductor = made(live=cluster(2, 3))
    for i in range(6):
        assert admit(conductor, str(i), candidates=frozenset({"d2:8000", "elsewhere:1"})).decode.id == "d2"
    answer = refused(conductor, candidates=frozenset({"elsewhere:1"}))
    assert (answer.reason, answer.reason.http_status) == (Reason.NO_ENDPOINTS, 503)
    assert refused(conductor, candidates=frozenset()).reason == Reason.NO_ENDPOINTS
    conductor.state.mark("d2", False)
    assert refused(conductor, candidates=frozenset({"d2:8000"})).reason == Reason.NO_ENDPOINTS
    assert admit(conductor, "all").decode.id != "d2"


def test_when_all_are_judged_down_all_may_be_chosen():
    conductor = made()
    for name in ("d0", "d1"):
        conductor.state.mark(name, False)
    admit(conductor, "a")
    conductor.state.mark("d1", True)
    assert {admit(conductor, f"b{i}").decode.id for i in range(4)} == {"d1"}


def test_a_coupled_instance_decodes_what_it_prefills():
    conductor = made(live=cluster(0, 0, 3))
    for i in range(9):
        answer = admit(conductor, str(i), tokens=prompt(2000, 5000 * i))
        assert answer.prefill.id == answer.decode.id
        for p, d in answer.fallbacks:
            assert p.id == d.id != answer.decode.id
    only = frozenset({"b1:8000"})
    answers = [admit(conductor, f"only{i}", candidates=only) for i in range(4)]
    assert {(answer.prefill.id, answer.decode.id) for answer in answers} == {("b1", "b1")}
    recount(conductor.state)


# --- policies that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        (RuntimeError("no"), "error"),
        (SystemExit(3), "error"),
        (math.nan, "invalid"),
        (math.inf, "invalid"),
        (1.5, "invalid"),
        (-1, "invalid"),
        (13, "invalid"),  # 2 prefills, 2 decodes, 3 sources: 0 .. 12
        (10**30, "invalid"),
        (lambda _: None, "invalid"),
        (lambda _: np.zeros(0), "invalid"),
        (lambda _: np.array(["p0"]), "invalid"),
    ],
)
def test_a_failing_policy_is_fallen_back_from(scripted, action, cause):
    conductor = made(SCRIPTED, fallback="load_balancing+none")
    scripted.action = action
    answer = admit(conductor, "a")
    assert (answer.fell_back, answer.policy) == (cause, "load_balancing+none")
    scripted.action = 1
    answer = admit(conductor, "b")
    assert (answer.fell_back, answer.policy, answer.prefill.id) == ("", SCRIPTED, "p0")


def test_a_policy_cannot_choose_who_may_not_be_chosen(scripted):
    conductor = made(SCRIPTED)
    conductor.state.mark("p0", False)
    answer = admit(conductor, "a")
    assert (answer.fell_back, answer.prefill.id) == ("invalid", "p1")
    assert admit(conductor, "b", candidates=frozenset({"d1:8000"})).decode.id == "d1"


def test_a_hanging_policy_is_waited_for_no_longer_than_its_deadline(hanging):
    conductor = made("tests.runtime.failing_policies:Hanging")
    assert admit(conductor, "a").fell_back == ""
    conductor.policy.deadline_s = 0.1
    hanging.set()
    causes = [admit(conductor, str(i)).fell_back for i in range(4)]
    assert causes == ["deadline", "hung", "hung", "hung"]
    hanging.clear()
    deadline = time.monotonic() + 20.0
    conductor.policy.deadline_s = PATIENT
    while (answer := admit(conductor, f"later{time.monotonic()}")).fell_back and time.monotonic() < deadline:
        time.sleep(0.01)
    assert answer.fell_back == ""


def test_workers_change_while_the_policy_hangs(hanging):
    conductor = made("tests.runtime.failing_policies:Hanging")
    conductor.policy.deadline_s = 0.1
    hanging.set()
    assert admit(conductor, "a").fell_back == "deadline"
    assert conductor.register(Worker(id="p9", role=Role.PREFILL, address="p9:8000"))
    assert conductor.policy.deadline_s == 0.1
    assert len(admit(conductor, "b").fallbacks) == 2
    recount(conductor.state)


def test_the_fallback_must_be_a_heuristic():
    with pytest.raises(PolicyError, match="fallback"):
        made(fallback=SCRIPTED)


def test_what_listens_cannot_spoil_a_decision():
    conductor = made()

    def broken(_: object) -> None:
        raise RuntimeError("disk full")

    conductor.on_made.append(broken)
    conductor.on_ended.append(broken)
    admit(conductor, "a")
    conductor.finished("a", output_tokens=5)
    assert not conductor.state.reservations


def test_a_decision_may_be_told_later_but_before_its_observation_or_its_reservation_goes():
    conductor, at_once, waiting = made(), made(), []
    conductor.later = waiting.append
    heard, expected = [], []
    for each, words in ((conductor, heard), (at_once, expected)):
        each.on_made.append(
            lambda made, words=words: words.append((made.answer.request_id, *(t.tobytes() for t in made.observation)))
        )
        each.on_ended.append(lambda reservation, words=words: words.append(("end", reservation.request_id)))
    for number, name in enumerate("abcd"):
        for each in (conductor, at_once):
            admit(each, name, tokens=prompt(100, 50 * number))
        assert heard == expected[:-1]
        if name == "a":  # told when the next one comes
            continue
        if name == "b":
            for each in (conductor, at_once):
                each.finished("b", output_tokens=5)
        elif name == "c":
            assert conductor.explained("c").data == at_once.explained("c").data
        else:
            waiting[-1]()
        assert heard == expected
    for told in waiting:  # once only
        told()
    assert heard == expected


# --- shadow and canary -----------------------------------------------------------------------------------------------


def test_a_shadow_decides_without_effect(scripted):
    conductor = made(shadow=SCRIPTED)
    alone = made()
    seen = []
    conductor.on_made.append(lambda made: seen.append((made.action, made.shadow_action)))
    for i in range(8):
        scripted.action = RuntimeError() if i == 7 else 1
        answer = admit(conductor, str(i), tokens=prompt(3000, 7000 * i))
        expected = admit(alone, str(i), tokens=prompt(3000, 7000 * i))
        assert (answer.prefill.id, answer.decode.id) == (expected.prefill.id, expected.decode.id)
        assert answer.fell_back == ""
    assert [shadow for _, shadow in seen] == [1] * 7 + [None]
    assert 1 <= sum(action == shadow for action, shadow in seen) < 7
    assert tables(conductor) == tables(alone)


def test_the_canary_has_its_share_and_the_propensity_says_so(scripted):
    share, count = 0.2, 2000
    Canary.action = 4  # prefill 0, decode 1
    conductor = made(SCRIPTED, canary="tests.runtime.failing_policies:Canary", canary_share=share, seed=7)
    seen = []
    conductor.on_made.append(lambda made: seen.append((made.answer.policy, made.probability)))
    for i in range(count):
        agree = i % 2 == 1
        scripted.action = 4 if agree else 1
        decode = admit(conductor, str(i)).decode.id
        canary = seen[-1][0].endswith("Canary")
        assert decode == ("d1" if canary or agree else "d0")
        assert seen[-1][1] == (1.0 if agree else share if canary else 1.0 - share)
        conductor.release(str(i))
    decided = sum(policy.endswith("Canary") for policy, _ in seen)
    assert abs(decided - share * count) < 4.0 * math.sqrt(count * share * (1 - share))


def test_the_canary_decides_for_the_same_requests_again():
    def deciders() -> list[str]:
        conductor = made(canary="round_robin", canary_share=0.3, seed=7)
        return [admit(conductor, str(i), dry_run=True).policy for i in range(100)]

    assert deciders() == deciders()


# --- overload --------------------------------------------------------------------------------------------------------


def fill(conductor: Conductor, upto: int = 10_000) -> Rejection:
    """Requests until one is turned away."""
    for i in range(upto):
        answer = conductor.schedule(Request(f"fill{i}", tokens=prompt(8000, 10_000 * i)))
        if isinstance(answer, Rejection):
            return answer
    raise AssertionError("never full")


def test_early_rejection_says_when_to_come_again():
    conductor = made("conductor+slo", live=cluster(1, 8))
    first = fill(conductor)
    assert (first.reason, first.reason.http_status) == (Reason.SATURATED, 429)
    slo_s = SPEC.slo.ttft_s
    assert first.predicted_ttft_s > slo_s
    # the queue drains second by second: what is predicted above the SLO is to be waited for
    assert first.retry_after_s == pytest.approx(min(MOST_RETRY_S, max(1.0, first.predicted_ttft_s - slo_s)))
    longer = refused(conductor, "longer", tokens=prompt(30_000, 5_000_000))
    assert longer.predicted_ttft_s > first.predicted_ttft_s
    assert longer.retry_after_s == pytest.approx(min(MOST_RETRY_S, longer.predicted_ttft_s - slo_s))
    assert first.retry_after_s < longer.retry_after_s <= MOST_RETRY_S
    for reservation in list(conductor.state.reservations.values()):
        conductor.release(reservation.request_id)
    admit(conductor, "after")


def test_a_request_may_bring_its_own_slo():
    conductor = made("conductor+slo")
    answer = refused(conductor, tokens=prompt(8000), ttft_slo_s=1e-3)
    assert answer.reason == Reason.SATURATED
    assert "SLO 0.001 s" in answer.message
    admit(conductor, "a", tokens=prompt(8000), ttft_slo_s=1e3)


def test_the_tenant_with_more_than_its_share_is_turned_away_first():
    conductor = made("conductor+slo", live=cluster(1, 8), shares=TenantShares({"bought": 8.0}, half_life_s=1e9))
    for i in range(40):  # while there is room, nobody notices
        tenant = "greedy" if i % 10 else "modest"
        admit(conductor, str(i), tokens=prompt(8000, 10_000 * i), tenant=tenant)
        conductor.finished(str(i), output_tokens=10)
    turned_away: dict[str, int] = {}
    for i in range(400):
        for tenant in ("greedy", "modest"):
            request = Request(f"{tenant}{i}", tokens=prompt(2000, 10_000_000 + 10_000 * i), tenant=tenant)
            answer = conductor.schedule(Request(**{**_fields(request), "dry_run": True}))
            if isinstance(answer, Rejection) and tenant not in turned_away:
                turned_away[tenant] = i
                if tenant == "greedy":
                    assert answer.reason == Reason.TENANT_SHARE
                    assert "greedy" in answer.message
                    assert answer.reason.http_status == 429
        if len(turned_away) == 2:
            break
        conductor.schedule(Request(f"load{i}", tokens=prompt(2000, 30_000_000 + 10_000 * i)))
    assert turned_away["greedy"] < turned_away["modest"]


def _fields(request: Request) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__slots__}


def test_a_share_is_by_weight():
    shares = TenantShares({"bought": 3.0}, half_life_s=1e9)
    shares.charge("bought", 300.0, 0.0, 0.0)
    shares.charge("other", 100.0, 0.0, 0.0)
    assert shares.excess("bought", 0.0) == shares.excess("other", 0.0) == 0.0
    shares.weigh({})
    assert shares.excess("bought", 0.0) == pytest.approx(0.5)
    shares.weigh({"bought": 1e-9, "other": 1e-9})
    assert math.isfinite(shares.excess("bought", 0.0))


def test_tenants_are_forgotten():
    shares = TenantShares(half_life_s=1.0, most=100)
    for i in range(1000):
        shares.charge(str(i), 10.0, 0.0, 0.0)
    assert len(shares.tokens) == 100
    assert shares.headroom("new", 0, 100.0) == (1.0, 1.0)
    assert not shares.tokens


def test_higher_priority_goes_on_longer():
    conductor = made("conductor+slo", live=cluster(1, 8))
    order = []
    for i in range(400):
        for priority in (-3, 0, 3):
            answer = conductor.schedule(Request("x", tokens=prompt(2000, 9_000_000), priority=priority, dry_run=True))
            if isinstance(answer, Rejection) and priority not in order:
                order.append(priority)
        if len(order) == 3:
            break
        conductor.schedule(Request(f"load{i}", tokens=prompt(4000, 10_000 * i), priority=9))
    assert order == [-3, 0, 3]


# --- looking only ----------------------------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing():
    conductor = made(lease_s=10.0, shares=TenantShares(half_life_s=math.inf))
    conductor.state.index.store(1, Medium.GPU, hash_blocks(prompt(3200), 16))
    admit(conductor, "a", arrival_s=1.0, tenant="t")
    conductor.state.advance(2.0)
    conductor.clock.now(2.0)
    before, tokens = tables(conductor), dict(conductor.shares.tokens)
    for tenant in ("t", "u"):
        answer = admit(conductor, "dry", tokens=prompt(3200), arrival_s=2.0, tenant=tenant, dry_run=True)
        assert answer.prefill.id == "p1"
    assert refused(conductor, "dry", tokens=None, input_tokens=10**7, dry_run=True).reason == Reason.TOO_LARGE
    assert refused(conductor, "dry", ttft_slo_s=1e-9, dry_run=True).reason == Reason.SATURATED
    assert tables(conductor) == before
    assert conductor.shares.tokens == tokens
    assert list(conductor.state.reservations) == ["a"]
    assert conductor.explained("dry") is not None


def test_a_lease_that_ends_during_a_dry_run_has_ended():
    conductor = made(lease_s=10.0)
    admit(conductor, "a", arrival_s=0.0)
    admit(conductor, "dry", arrival_s=100.0, dry_run=True)
    assert not conductor.state.reservations
    recount(conductor.state)


def test_explanations_outlive_the_workers_they_name():
    conductor = made(live=cluster(3, 2))
    admit(conductor, "a")
    conductor.deregister("p0")
    explained = conductor.explained("a")
    assert explained.observation.prefill.shape[1] == 3
    assert [worker.id for worker in explained.cluster.prefills] == ["p0", "p1", "p2"]
    assert conductor.explained("never") is None


def test_explanations_are_bounded():
    conductor = made("conductor+none", in_flight=8)
    for i in range(5000):
        admit(conductor, str(i), dry_run=True)
    assert conductor.explained("0") is None
    assert conductor.explained("4999") is not None
    assert len(conductor._explained) <= 4096


# --- changes while serving -------------------------------------------------------------------------------------------


def test_policies_change_all_or_none(scripted):
    conductor = made(shadow=SCRIPTED)
    scripted.action = RuntimeError("broken")
    for names in (
        {"policy": "round_robin", "shadow": "no_such"},
        {"policy": "round_robin", "fallback": SCRIPTED},
        {"policy": "round_robin", "canary": SCRIPTED},
        {"policy": "round_robin", "canary": "tests.runtime.failing_policies:Unmakeable"},
        {"policy": "round_robin", "canary": "tests.runtime.failing_policies:Missing"},
        {"policy": "", "shadow": ""},
        {"policy": "round_robin", "shadow": "no_such_module:Policy"},
    ):
        with pytest.raises(PolicyError):
            conductor.change_policies(names)
        assert (conductor.policy.name, conductor.fallback.name) == ("conductor+predictive", "conductor+slo")
        assert conductor.shadow is not None
        assert conductor.canary is None
    scripted.action = 1
    conductor.change_policies({"policy": "round_robin", "shadow": "", "canary": SCRIPTED}, 1.0)
    assert conductor.shadow is None
    assert admit(conductor, "a").policy == SCRIPTED
    conductor.change_policies({"canary": ""})
    assert conductor.canary_share == 0.0
    assert admit(conductor, "b").policy == "round_robin"


def test_a_policy_that_hangs_is_not_taken_into_service(hanging, monkeypatch):
    conductor = made()
    monkeypatch.setattr("runtime.conductor.TRIAL_S", 0.2)
    hanging.set()
    with pytest.raises(PolicyError, match="no decision within"):
        conductor.change_policies({"policy": "tests.runtime.failing_policies:Hanging"})
    assert conductor.policy.name == "conductor+predictive"


def test_workers_come_and_go_and_what_is_known_of_the_others_stays():
    conductor = made(live=cluster(3, 3))
    tokens = prompt(3200)
    conductor.state.index.store(2, Medium.GPU, hash_blocks(tokens, 16))
    held = [admit(conductor, str(i), tokens=prompt(2000, 9000 * i)) for i in range(9)]
    ended = []
    conductor.on_ended.append(ended.append)
    assert conductor.deregister("p0")
    assert not conductor.deregister("p0")
    lost = {answer.request_id for answer in held if answer.prefill.id == "p0"}
    assert {reservation.request_id for reservation in ended} == lost != set()
    recount(conductor.state)
    assert conductor.register(Worker(id="p3", role=Role.PREFILL, address="p3:8000"))
    assert not conductor.register(Worker(id="p3", role=Role.PREFILL, address="p3:8001"))
    assert not conductor.register(Worker(id="p3", role=Role.PREFILL, address="p3:8001"))
    assert len(conductor.state.reservations) == 9 - len(lost)
    answer = admit(conductor, "again", tokens=tokens)
    assert answer.reused_tokens == 3199
    assert (answer.holder or answer.prefill).id == "p2"
    for answer in held:
        conductor.finished(answer.request_id, output_tokens=4)
    recount(conductor.state)


def test_the_last_of_a_role_cannot_go():
    conductor = made(live=cluster(1, 1))
    for name in ("p0", "d0"):
        with pytest.raises(SpecError, match="at least one"):
            conductor.deregister(name)
    admit(conductor, "a")


def test_a_worker_may_change_its_role():
    conductor = made(live=cluster(2, 2))
    for i in range(6):
        admit(conductor, str(i), tokens=prompt(2000, 9000 * i))
    mine = {r.request_id for r in conductor.state.reservations.values() if r.prefill == 0}
    conductor.register(Worker(id="p0", role=Role.DECODE, address="p0:8000"))
    recount(conductor.state)
    assert mine
    assert not mine & set(conductor.state.reservations)
    conductor.register(Worker(id="p0", role=Role.BOTH, address="p0:8000"))
    conductor.register(Worker(id="d0", role=Role.BOTH, address="d0:8000"))
    for i in range(6):
        admit(conductor, f"b{i}", tokens=prompt(2000, 9000 * i))
    recount(conductor.state)
    conductor.register(Worker(id="p0", role=Role.PREFILL, address="p0:8000"))
    recount(conductor.state)
    for name in list(conductor.state.reservations):
        conductor.finished(name, output_tokens=3)
    recount(conductor.state)
    assert not (conductor.state.decode["pending_requests"] != 0).any()


def test_the_holder_of_a_prefix_leaves_during_the_fetch(scripted):
    conductor = made(SCRIPTED, live=cluster(3, 2))
    tokens = prompt(3200)
    conductor.state.index.store(1, Medium.GPU, hash_blocks(tokens, 16))
    scripted.action = 1 + Source.FETCH
    assert admit(conductor, "a", tokens=tokens).holder.id == "p1"
    conductor.deregister("p1")
    recount(conductor.state)
    reservation = conductor.state.reservations["a"]
    assert (reservation.holder, reservation.fetching, reservation.stage) == (-1, 0, Stage.PREFILL)
    conductor.finished("a", output_tokens=4)
    recount(conductor.state)
    assert (conductor.state.prefill["tx_flows"] == 0).all()


def test_what_is_known_before_the_first_request_survives_a_registration():
    """As after a warm start."""
    conductor = made()
    tokens = prompt(3200)
    conductor.state.index.store(1, Medium.GPU, hash_blocks(tokens, 16))
    conductor.register(Worker(id="p9", role=Role.PREFILL, address="p9:8000"))
    assert admit(conductor, "a", tokens=tokens).reused_tokens == 3199


# --- time, and what piles up -----------------------------------------------------------------------------------------


def test_the_time_of_day_may_jump(monkeypatch):
    conductor = made(clock=Clock(), lease_s=1000.0)
    admit(conductor, "a")
    before = conductor.clock.now()
    for jump_s in (1e9, -1e9):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: 1.7e9 + jump_s)
        admit(conductor, f"b{jump_s}", arrival_s=jump_s)
        assert before <= conductor.clock.now() < before + 900.0
    assert len(conductor.state.reservations) == 3


def test_an_external_clock_never_goes_back():
    clock = Clock(external=True)
    assert [clock.now(at_s) for at_s in (5.0, 3.0, math.nan, math.inf, None, 7.0)] == [5.0, 5.0, 5.0, 5.0, 5.0, 7.0]


def test_what_has_ended_is_not_kept_for_its_lease():
    conductor = made("conductor+none", in_flight=64, lease_s=1e9)
    for i in range(6000):
        admit(conductor, str(i), tokens=prompt(1600, 10 * i))
        conductor.finished(str(i), output_tokens=2)
    assert len(conductor.state._steps) < 3000
    assert not any(len(step[2].hashes) for step in conductor.state._steps)


def test_what_waited_for_requests_of_others_goes_on_when_these_have_ended():
    conductor = made(live=cluster(1, 1))
    conductor.state.engine_metrics("p0", EngineMetrics(running=2.0, waiting=1.0))
    admit(conductor, "a", arrival_s=1.0, reported=False)
    assert conductor.state.reservations["a"].stage == Stage.QUEUED
    conductor.state.engine_metrics("p0", EngineMetrics(running=1.0, waiting=0.0))
    assert conductor.state.reservations["a"].stage == Stage.PREFILL
    recount(conductor.state)


@pytest.mark.parametrize("number", [1e300, 2.0**63, 1e18])
def test_nonsense_of_an_engine_is_survived(number):
    conductor = made()
    for name in ("p0", "d0"):
        conductor.state.engine_metrics(name, EngineMetrics(running=number, waiting=number, kv_usage=1.0))
    answer = admit(conductor, "a")
    assert (answer.prefill.id, answer.decode.id) == ("p1", "d1")
    for name in ("p0", "d0"):
        conductor.state.engine_metrics(name, EngineMetrics(running=0.0, waiting=0.0, kv_usage=0.0))
    conductor.release("a")
    recount(conductor.state)
    assert conductor.state.prefill["queued_s"][0] == pytest.approx(0.0, abs=1e-6)


def test_joins_told_twice_count_once():
    conductor = made()
    admit(conductor, "a")
    reservation = conductor.state.reservations["a"]
    conductor.state.joined([reservation, reservation], 1.0)
    conductor.state.joined([reservation], 1.0)
    recount(conductor.state)


# --- the re-check, and another attempt -------------------------------------------------------------------------------


def test_the_recheck_is_that_of_the_physics():
    """docs/physics.md, "Decode": with the batch, those that wait, and itself; the stall of joins that came before."""
    conductor = made("conductor+none", live=cluster(1, 1))
    node = SPEC.decode[0].profile.decode
    state = conductor.state
    for i in range(3):
        admit(conductor, f"r{i}", tokens=prompt(1000, 10_000 * i))
    now_s = conductor.clock.now(1000.0)
    first, second, third = (state.reservations[f"r{i}"] for i in range(3))
    state.joined([first], now_s, stall_s=0.0)
    state.prefill_done(second, now_s)
    state.kv_ready(second)  # and waits
    step_s = node.base_s + node.per_request_s * 3 + node.per_token_s * 3000
    assert state.recheck(third, now_s) == pytest.approx(step_s, rel=1e-9)
    batch_s = node.base_s + node.per_request_s + node.per_token_s * 1000
    later_s = now_s + 100 * batch_s  # the batch has made 100 tokens
    step_s += node.per_token_s * 100
    state.prefill_done(third, later_s)
    assert state.recheck(third, later_s) == pytest.approx(step_s, rel=1e-9)
    conductor.clock.now(later_s)
    third.tbt_slo_s = step_s * 1.001
    assert conductor.recheck("r2") is None and third.stage == Stage.TRANSFER
    third.tbt_slo_s = step_s * 0.999
    wasted_s = third.prefill_s
    answer = conductor.recheck("r2")
    assert answer is not None and answer.reason == Reason.RECHECK and answer.reason.http_status == 429
    assert answer.predicted_tbt_s == pytest.approx(step_s) and answer.retry_after_s >= 1.0
    assert third.end == "recheck" and "r2" not in state.reservations
    assert state.clock["rejected_at_decode"] == 1 and state.clock["wasted_prefill_s"] == wasted_s > 0
    recount(state)


def test_another_attempt_goes_where_it_is_told_and_is_no_other_decision():
    conductor = made("round_robin")
    listened: list[Request] = []
    conductor.on_made.append(lambda each: listened.append(each.request))
    first = admit(conductor, "r")
    conductor.release("r", "prefill")
    pair = ("p1" if first.prefill.id == "p0" else "p0", first.decode.id)
    again = admit(conductor, "r", pair=pair)
    assert (again.prefill.id, again.decode.id) == pair and again.source == Source.LOCAL
    assert len(listened) == 1
    recount(conductor.state)
    with pytest.raises(RequestError, match="no worker is called 'p9'"):
        conductor.schedule(Request("s", tokens=prompt(100), pair=("p9", "d0")))
