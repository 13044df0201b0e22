"""`Conductor`: the decision on live requests, and what keeps it safe.

A request comes in, its prompt is looked up in the prefix index, `envs.observe` makes the observation, the policy
decides, the decision is entered in the live state, and the answer names two workers or says why there is none. The
observation and the policies are those of the gym. Around them: a fallback for a policy that fails, a shadow policy that
decides without effect, a canary that decides for some, and policies and clusters that change while serving.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.observer import Observer, observation_of
from envs.state import Observation, Source
from policies import PolicyError

from .block_hash import Namespace, namespace, token_array
from .fairness import TenantShares
from .guard import Guard, PolicyFailure
from .live_state import NO_BLOCKS, NO_HASHES, SOURCES, LiveState, Reservation, Stage
from .request import Assignment, Reason, Rejection, Request, RequestError
from .workers import LiveCluster, Worker, resized

log = logging.getLogger(__name__)

FALLBACKS = 2  # other pairs named in an answer
LONGEST_PROMPT = 1 << 24  # tokens
LONGEST_NAME = 256  # characters of what is remembered of a request: its id, its tenant
LONGEST_LEASE_S = 86400.0  # a client that dies leaves nothing for ever
LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
TRIAL_S = 60.0  # for the first decision of a policy: it may have to load or compile
EXPLANATION_BYTES = 64 << 20  # of explanations kept


class Clock:
    """Seconds since it was made. Monotonic, whatever the time of day does.

    `external`: time is what requests and reports say it is, for simulated workers.
    """

    def __init__(self, *, external: bool = False) -> None:
        self.external = external
        self._zero_s = time.monotonic()
        self._latest_s = 0.0

    def now(self, given_s: float | None = None) -> float:
        """The time; `given_s` counts with an external clock only, and never goes back."""
        if not self.external:
            return time.monotonic() - self._zero_s
        if given_s is not None and math.isfinite(given_s):
            self._latest_s = max(self._latest_s, given_s)
        return self._latest_s


@dataclass(slots=True)
class Made:
    """A decision as those who count, log or explain it see it. `observation` is overwritten by the next request."""

    request: Request
    answer: Assignment | Rejection
    observation: Observation | None
    action: int
    probability: float  # with which it was made, given the observation: below 1 where a canary disagrees
    arrival_s: float
    seconds: float  # it took
    hashes: NDArray[np.uint64]
    reservation: Reservation | None
    expected_output_tokens: float  # of a request, at the time
    shadow_action: int | None = None  # None where the shadow policy failed, or there is none


@dataclass(slots=True)
class Explained:
    """A decision kept for `explain`."""

    data: bytes  # of the observation
    cluster: LiveCluster
    answer: Assignment | Rejection
    action: int

    @property
    def observation(self) -> Observation:
        """What was decided on."""
        return observation_of(self.data, self.cluster.spec.n_prefill, self.cluster.spec.n_decode)


class Conductor:
    """Decides for live requests.

    Args:
        cluster: spec and workers.
        policy: name, run folder or artifact (`policies.make_policy`). fallback: decides where the policy fails; must
            be a heuristic. shadow: decides beside the policy, without effect. canary: decides for `canary_share`.
        deadline_s: most seconds for a decision of the policy.
        blocks: distinct blocks to remember. in_flight: most reservations.
        lease_s: a reservation ends by itself this long after the last report.
        assumed_s: for how long what was routed to a worker without KV events is taken to be cached there.
        clock: where the time comes from. shares: of tenants. seed: of random policies and of the canary.

    Raises:
        PolicyError: a policy is unknown or cannot be loaded.
    """

    def __init__(
        self,
        cluster: LiveCluster,
        policy: str = "conductor+predictive",
        *,
        fallback: str = "conductor+slo",
        shadow: str = "",
        canary: str = "",
        canary_share: float = 0.0,
        deadline_s: float = 0.005,
        blocks: int = 1 << 20,
        in_flight: int = 1 << 16,
        lease_s: float = 120.0,
        assumed_s: float = 300.0,
        clock: Clock | None = None,
        shares: TenantShares | None = None,
        seed: int = 0,
    ) -> None:
        self.clock = clock or Clock()
        self.deadline_s = deadline_s
        self.lease_s = lease_s
        self.seed = seed
        self.shares = shares or TenantShares()
        self.state = LiveState(cluster, blocks=blocks, in_flight=in_flight, assumed_s=assumed_s, on_end=self._ended)
        self.policy = Guard(policy, deadline_s=deadline_s, seed=seed)
        self.fallback = Guard(fallback, deadline_s=math.inf, seed=seed)
        if not self.fallback.heuristic:
            raise PolicyError(f"fallback {fallback!r} must be a heuristic by name: it is what is left when others fail")
        self.shadow = Guard(shadow, deadline_s=deadline_s, seed=seed) if shadow else None
        self.canary = Guard(canary, deadline_s=deadline_s, seed=seed) if canary else None
        self.canary_share = canary_share if canary else 0.0
        self.draining = False
        self.cached_under: tuple[str, ...] = ("", "", "")  # model, salt and tenant of the workers' KV events
        self.on_made: list[Callable[[Made], None]] = []
        self.on_ended: list[Callable[[Reservation], None]] = []
        self.tells_later = False  # whoever serves calls `catch_up`, and so `tell`, soon after an answer is on its way
        self._untold: Made | None = None
        self._random = random.Random(seed)
        self._pairs = np.full((FALLBACKS, 2), -1, np.int64)
        self._explained: OrderedDict[str, Explained] = OrderedDict()
        self._next_any = 0
        self._warm_up()

    # --- deciding ----------------------------------------------------------------------------------------------------

    def schedule(self, request: Request) -> Assignment | Rejection:
        """Decide for a request and enter its reservation.

        Raises:
            RequestError: the request cannot be; the message names the field.
        """
        started = time.perf_counter()
        self.tell()
        state = self.state
        now_s = self.clock.now(request.arrival_s)
        state.advance(now_s)
        input_tokens = self._checked(request)
        expected = state.expected_output_tokens
        candidates = self._candidates(request)
        refusal = self._refusal(request, input_tokens, candidates)
        if refusal is not None:
            hashes = request.hashes if request.hashes is not None else NO_HASHES
            if request.tokens is not None:
                hashes = state.index.find_tokens(request.tokens, self._namespace(request))[1]
            seconds = time.perf_counter() - started
            self._tell(Made(request, refusal, None, 0, 1.0, now_s, seconds, hashes, None, expected))
            return refusal
        by_priority, by_share = self.shares.headroom(request.tenant, request.priority, now_s)
        headroom = by_priority * by_share
        ttft_slo_s = request.ttft_slo_s or state.spec.slo.ttft_s
        tbt_slo_s = request.tbt_slo_s or state.spec.slo.tbt_s
        before = state.observer.state.clock.copy() if request.dry_run else None
        arrived = now_s, ttft_slo_s * headroom, tbt_slo_s * headroom, candidates
        if request.tokens is not None:
            tokens = token_array(request.tokens)
            observation, known, hashes = state.observe_tokens(tokens, self._namespace(request), *arrived)
        else:
            known, hashes = NO_BLOCKS, NO_HASHES
            if request.hashes is not None:
                known, hashes = state.index.find(request.hashes), request.hashes
            observation = state.observe(input_tokens, known, *arrived)
        if before is not None:
            state.observer.state.clock[:] = before
        if request.pair is not None:
            action = self._action(request.pair)
            again, assigned = self._assign(request, action, input_tokens, now_s, ttft_slo_s, tbt_slo_s)
            state.admit(again, hashes, known)
            return assigned
        guard, other = self._who()
        fell_back = ""
        try:
            action = guard.decide(observation)
        except PolicyFailure as failure:
            log.warning("%s; %s decides", failure, self.fallback.name)
            guard, fell_back = self.fallback, failure.cause
            action = self._fall_back(observation)
        probability = 1.0
        if other is not None and not fell_back and self._alone(other, observation) != action:
            probability = self.canary_share if guard is self.canary else 1.0 - self.canary_share
        reservation = None
        answer: Assignment | Rejection
        if action == 0:
            answer = self._rejection(request, observation, by_share, headroom)
        else:
            reservation, answer = self._assign(request, action, input_tokens, now_s, ttft_slo_s, tbt_slo_s)
            if not request.dry_run:
                state.admit(reservation, hashes, known)
                answer.reused_tokens = reservation.reused_tokens
                answer.source = reservation.source
                if request.tenant:
                    self.shares.charge(request.tenant, input_tokens, expected, now_s)
        answer.policy, answer.fell_back = guard.name, fell_back
        made = Made(request, answer, observation, action, probability, now_s, 0.0, hashes, reservation, expected)
        if self.shadow is not None:
            made.shadow_action = self._alone(self.shadow, observation)
        made.seconds = time.perf_counter() - started
        self._untold = made
        if not self.tells_later:
            self.tell()
        return answer

    def tell(self) -> None:
        """Keep the last decision for `explain`, and tell those who listen; at the latest when its observation goes."""
        made, self._untold = self._untold, None
        if made is not None:
            self._keep(made)
            self._tell(made)

    def _tell(self, made: Made) -> None:
        """Those who listen; what goes wrong with them is not the request's affair."""
        for listener in self.on_made:
            try:
                listener(made)
            except Exception:
                log.exception("a decision could not be counted or logged")

    def _checked(self, request: Request) -> int:
        """The length of the prompt; everything that a request says of itself can be.

        Raises:
            RequestError: it cannot; the message names the field.
        """
        tokens = request.tokens
        n = len(tokens) if tokens is not None else request.input_tokens
        if not 1 <= n <= LONGEST_PROMPT:
            raise RequestError(f"input_tokens: expected 1 .. {LONGEST_PROMPT}, found {n}")
        for name, text in (("request_id", request.request_id), ("tenant", request.tenant)):
            if len(text) > LONGEST_NAME:
                raise RequestError(f"{name}: expected at most {LONGEST_NAME} characters, found {len(text)}")
        for name, seconds in (
            ("lease_s", request.lease_s),
            ("ttft_slo_s", request.ttft_slo_s),
            ("tbt_slo_s", request.tbt_slo_s),
        ):
            if seconds is not None and not 0 < seconds < math.inf:
                raise RequestError(f"{name}: expected seconds above 0, found {seconds}")
        if request.lease_s is not None and request.lease_s > LONGEST_LEASE_S and not self.clock.external:
            raise RequestError(f"lease_s: expected at most {LONGEST_LEASE_S:g} seconds, found {request.lease_s}")
        if tokens is None and request.hashes is not None and len(request.hashes) > -(-n // self.state.block_tokens):
            raise RequestError(
                f"block_hashes: {len(request.hashes)} blocks of {self.state.block_tokens} tokens are more than "
                f"{n} input_tokens fill"
            )
        if request.request_id in self.state.reservations:
            raise RequestError(f"request_id {request.request_id!r} is in flight already")
        return n

    def _action(self, pair: tuple[str, str]) -> int:
        """The action that sends a request to two workers, with what the first has cached.

        Raises:
            RequestError: one of them is gone.
        """
        p, d = self.state.prefill_of.get(pair[0]), self.state.decode_of.get(pair[1])
        if p is None or d is None:
            raise RequestError(f"pair: no worker is called {pair[0] if p is None else pair[1]!r}")
        return 1 + (p * len(self.state.decodes) + d) * len(SOURCES) + int(Source.LOCAL)

    def _namespace(self, request: Request) -> Namespace:
        """Within what the prompt's tokens mean cached blocks."""
        model, salt, tenant = self.cached_under
        return namespace(
            model, request.lora_name, salt=request.namespace or salt, tenant=tenant, cache_salt=request.cache_salt
        )

    def _refusal(self, request: Request, input_tokens: int, candidates: list[int] | None) -> Rejection | None:
        """Why there is nothing to decide, where there is not."""
        state = self.state
        if self.draining:
            return Rejection(request.request_id, Reason.SHUTTING_DOWN, "the scheduler is shutting down", 1.0)
        if state.full:
            return Rejection(
                request.request_id, Reason.QUEUE_FULL, f"{len(state.flying)} requests are in flight, no more fit", 1.0
            )
        if candidates is not None and not candidates:
            return Rejection(
                request.request_id, Reason.NO_ENDPOINTS, "no eligible worker among the candidates", LEAST_RETRY_S
            )
        if input_tokens >= state.largest_context:
            return Rejection(
                request.request_id,
                Reason.TOO_LARGE,
                f"the prompt has {input_tokens} tokens, the largest decode worker holds {state.largest_context}",
            )
        return None

    def _candidates(self, request: Request) -> list[int] | None:
        """Indices of the decode instances that may be chosen, those up; None: all."""
        if request.candidates is None:
            return None
        decodes, up = self.state.decodes, self.state.open_decode
        return [d for d, worker in enumerate(decodes) if up[d] and worker.address in request.candidates]

    def _who(self) -> tuple[Guard, Guard | None]:
        """Who decides, and who could have, where there is a canary."""
        if self.canary is None:
            return self.policy, None
        if self._random.random() < self.canary_share:
            return self.canary, self.policy
        return self.policy, self.canary

    @staticmethod
    def _alone(guard: Guard, observation: Observation) -> int | None:
        """What a policy would do, without effect; None where it fails."""
        try:
            return guard.decide(observation)
        except PolicyFailure:
            return None

    def _fall_back(self, observation: Observation) -> int:
        try:
            return self.fallback.decide(observation)
        except PolicyFailure as failure:  # cannot be, but serving goes on: the shortest queue, the smallest batch
            log.error("the fallback failed: %s", failure)
            queue_s = np.where(observation.prefill_mask[0, :, 0], observation.prefill["queue_s"][0], math.inf)
            tbt_s = np.where(observation.decode_mask[0], observation.decode["batch"][0], math.inf)
            return int(1 + (queue_s.argmin() * observation.decode.shape[1] + tbt_s.argmin()) * 3)

    def _assign(
        self,
        request: Request,
        action: int,
        input_tokens: int,
        now_s: float,
        ttft_slo_s: float,
        tbt_slo_s: float,
    ) -> tuple[Reservation, Assignment]:
        state = self.state
        pair, source = divmod(action - 1, 3)
        p, d = divmod(pair, len(state.decodes))
        if state.twin[p] >= 0:
            d = int(state.twin[p])
        holder, ttft_s, tbt_s = state.place(p, d, source, self._pairs)
        lease_s = request.lease_s or self.lease_s
        reservation = Reservation(
            request.request_id,
            p,
            d,
            SOURCES[source],
            holder,
            input_tokens,
            now_s,
            0.0,
            ttft_s,
            tbt_s,
            ttft_slo_s,
            tbt_slo_s,
            lease_s,
            now_s + ttft_s + lease_s,
            request.reported,
            request.tenant,
        )
        answer = Assignment(
            request.request_id,
            state.prefills[p],
            state.decodes[d],
            SOURCES[source],
            state.prefills[holder] if holder >= 0 else None,
            input_tokens,
            0,
            ttft_s,
            tbt_s,
            lease_s,
            "",
            "",
            self._fallbacks(d),
        )
        return reservation, answer

    def _fallbacks(self, d: int) -> tuple[tuple[Worker, Worker], ...]:
        """Other pairs, best first, where decode instance d is the chosen one."""
        state = self.state
        named = []
        for other_p, other_d in self._pairs.tolist():
            if other_p < 0:
                break
            if state.twin[other_p] >= 0:
                other_d = int(state.twin[other_p])
                if other_d == d:
                    continue
            named.append((state.prefills[other_p], state.decodes[other_d]))
        return tuple(named)

    def _rejection(self, request: Request, observation: Observation, by_share: float, headroom: float) -> Rejection:
        """Early rejection: what the forecast says, and when it would be worth trying again."""
        state = self.state
        cluster = observation.cluster[0, 0]
        wanted = observation.request[0, 0]
        ttft_slo_s, tbt_slo_s = float(wanted["ttft_slo_s"]) / headroom, float(wanted["tbt_slo_s"]) / headroom
        ttft_s = float(cluster["prefill_load"]) * float(wanted["ttft_slo_s"])
        load = max(float(cluster["decode_load_now"]), float(cluster["decode_load_forecast"])) * headroom
        tbt_s = load * tbt_slo_s
        # the prefill queue drains second by second; a decode batch as its requests end
        wait_s = max(
            ttft_s - ttft_slo_s, float(cluster["expected_decode_s"]) * (1.0 - 1.0 / load) if load > 1.0 else 0.0
        )
        fits = ttft_s <= ttft_slo_s and load <= 1.0
        reason = Reason.TENANT_SHARE if fits and by_share < 1.0 else Reason.SATURATED
        message = (
            f"predicted TTFT {ttft_s:.3g} s (SLO {ttft_slo_s:.3g} s), predicted TBT {tbt_s * 1e3:.3g} ms "
            f"(SLO {tbt_slo_s * 1e3:.3g} ms)"
        )
        if reason == Reason.TENANT_SHARE:
            message += f"; tenant {request.tenant!r} has had more than its share"
        retry_s = min(MOST_RETRY_S, max(LEAST_RETRY_S, wait_s))
        state.clock["rejected_at_arrival"] += 0 if request.dry_run else 1
        return Rejection(request.request_id, reason, message, retry_s, ttft_s, tbt_s)

    def any_decode(self, candidates: frozenset[str] | None = None) -> Worker | None:
        """Some decode worker that is up and has an address, in turn: for what is no generation (`GET /v1/models`)."""
        decodes, up = self.state.decodes, self.state.open_decode
        for _ in range(len(decodes)):
            self._next_any = (self._next_any + 1) % len(decodes)
            worker = decodes[self._next_any]
            if up[self._next_any] and worker.address and (candidates is None or worker.address in candidates):
                return worker
        return None

    def catch_up(self) -> None:
        """Bring the books up to now, so that the next decision has less to do."""
        self.tell()
        self.state.advance(self.clock.now())

    # --- what becomes of it ------------------------------------------------------------------------------------------

    def release(self, request_id: str, how: str = "cancelled") -> None:
        """End a reservation; ids that hold none are ignored."""
        reservation = self.state.reservations.get(request_id)
        if reservation is not None:
            self.catch_up()
            self.state.end(reservation, how)

    def served(self, request_id: str, address: str) -> None:
        """Another endpoint than the chosen one has served the request (a fallback was used)."""
        reservation = self.state.reservations.get(request_id)
        if reservation is None or self.state.decodes[reservation.decode].address == address:
            return
        for d, worker in enumerate(self.state.decodes):
            if worker.address == address:
                self.state.move(reservation, d)
                return

    def prefilled(self, request_id: str, *, reused_tokens: int | None = None) -> None:
        """Its prefill worker has replied; `reused_tokens` of the prompt were cached there, where that is known."""
        reservation = self.state.reservations.get(request_id)
        if reservation is None:
            return
        now_s = self.clock.now()
        self.state.advance(now_s)
        self.state.renew(reservation, now_s)
        if reused_tokens is not None:
            reservation.reused_tokens = min(reused_tokens, reservation.input_tokens - 1)
        # where it has overtaken another, the books do not know when it began
        reservation.prefill_reported = reservation.stage == Stage.PREFILL
        self.state.prefill_done(reservation, now_s)

    def recheck(self, request_id: str) -> Rejection | None:
        """Whether its decode instance can still meet its TBT SLO ([F] 4: the double check after the prefill).

        Where it cannot, the reservation ends, its prefill is wasted, and this is the answer.
        """
        state = self.state
        reservation = state.reservations.get(request_id)
        if reservation is None or not state.spec.decode_recheck:
            return None
        tbt_s = state.recheck(reservation, self.clock.now())
        if tbt_s <= reservation.tbt_slo_s:
            return None
        worker = state.decodes[reservation.decode].id
        state.end(reservation, "recheck")
        message = (
            f"predicted TBT on {worker} {tbt_s * 1e3:.3g} ms now that the prefill is done "
            f"(SLO {reservation.tbt_slo_s * 1e3:.3g} ms)"
        )
        wait_s = float(state.clock["expected_decode_s"]) * (1.0 - reservation.tbt_slo_s / tbt_s)
        retry_s = min(MOST_RETRY_S, max(LEAST_RETRY_S, wait_s))
        return Rejection(request_id, Reason.RECHECK, message, retry_s, reservation.ttft_s, tbt_s)

    def first_token(self, request_id: str) -> None:
        """It is in the batch of its decode worker."""
        reservation = self.state.reservations.get(request_id)
        if reservation is not None:
            now_s = self.clock.now()
            self.state.advance(now_s)
            self.state.joined([reservation], now_s)

    def alive(self, request_id: str) -> None:
        """It makes progress: its lease starts anew."""
        reservation = self.state.reservations.get(request_id)
        if reservation is not None:
            self.state.renew(reservation, self.clock.now())

    def finished(
        self,
        request_id: str,
        *,
        output_tokens: int | None = None,
        ttft_s: float | None = None,
        tbt_s: float | None = None,
    ) -> None:
        """A request is complete."""
        reservation = self.state.reservations.get(request_id)
        if reservation is None:
            return
        now_s = self.clock.now()
        self.state.advance(now_s)
        self.state.finished(
            reservation,
            now_s,
            output_tokens=output_tokens or 0,
            ttft_s=math.nan if ttft_s is None else ttft_s,
            tbt_s=math.nan if tbt_s is None else tbt_s,
        )

    def _ended(self, reservation: Reservation) -> None:
        self.tell()
        for listener in self.on_ended:
            try:
                listener(reservation)
            except Exception:
                log.exception("the end of a reservation could not be counted or logged")

    # --- explaining --------------------------------------------------------------------------------------------------

    def _keep(self, made: Made) -> None:
        data = self.state.observer.observation_bytes()
        self._explained[made.request.request_id] = Explained(data, self.state.cluster, made.answer, made.action)
        if len(self._explained) > min(4096, EXPLANATION_BYTES // len(data)):
            self._explained.popitem(last=False)

    def explained(self, request_id: str) -> Explained | None:
        """What a recent decision was based on."""
        self.tell()
        return self._explained.get(request_id)

    # --- changing while serving --------------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers, up or not."""
        return self.state.cluster.workers

    def register(self, worker: Worker) -> bool:
        """Add a worker, or change the one of its id; True where it is new.

        Raises:
            SpecError: the cluster it would make cannot be.
        """
        workers = list(self.workers)
        if worker in workers:
            return False
        for i, known in enumerate(workers):
            if known.id == worker.id:
                workers[i] = worker
                break
        else:
            workers.append(worker)
        new = len(workers) > len(self.workers)
        self.change_cluster(resized(self.state.spec, tuple(workers)))
        return new

    def deregister(self, worker_id: str) -> bool:
        """Remove a worker; its reservations end. False where there is none of that id.

        Raises:
            SpecError: it is the last of its role.
        """
        workers = tuple(worker for worker in self.workers if worker.id != worker_id)
        if len(workers) == len(self.workers):
            return False
        self.change_cluster(resized(self.state.spec, workers))
        return True

    def change_cluster(self, cluster: LiveCluster) -> None:
        """Go over to another cluster, keeping what is known of the workers that stay.

        Raises:
            ValueError: it cannot follow the present one.
        """
        self.catch_up()
        self.tell()
        self.state.change_cluster(cluster)
        for role in ("policy", "fallback", "shadow", "canary"):
            guard = getattr(self, role)
            if guard is not None and guard.inline:
                try:
                    self._try(role, guard)
                except PolicyError as error:
                    log.warning("%s, with the workers there are now", error)

    def change_policies(self, names: Mapping[str, str], canary_share: float | None = None) -> None:
        """Go over to other policies, all or none: keys policy, fallback, shadow, canary.

        Raises:
            PolicyError: one of them cannot be loaded or does not decide; nothing has changed then.
        """
        self.use_policies(self.load_policies(names), canary_share)

    def load_policies(self, names: Mapping[str, str]) -> dict[str, Guard | None]:
        """Policies for `use_policies`, by role; they have decided once. May run in a thread: it can take long.

        Raises:
            PolicyError: one of them cannot be loaded or does not decide.
        """
        made: dict[str, Guard | None] = {}
        for role, name in names.items():
            deadline_s = math.inf if role == "fallback" else self.deadline_s
            made[role] = Guard(name, deadline_s=deadline_s, seed=self.seed) if name else None
        for role in ("policy", "fallback"):
            if role in made and made[role] is None:
                raise PolicyError(f"{role}: expected the name of a policy")
        fallback = made.get("fallback", self.fallback)
        if fallback is not None and not fallback.heuristic:
            raise PolicyError(f"fallback {fallback.name!r} must be a heuristic by name")
        for role, guard in made.items():
            self._try(role, guard)
        return made

    def use_policies(self, made: Mapping[str, Guard | None], canary_share: float | None = None) -> None:
        """Go over to policies that were loaded."""
        for role, guard in made.items():
            old = getattr(self, role)
            setattr(self, role, guard)
            if old is not None:
                old.close()
        if canary_share is not None:
            self.canary_share = canary_share
        if self.canary is None:
            self.canary_share = 0.0

    def _try(self, role: str, guard: Guard | None) -> None:
        """Have a new policy decide once, so that what is broken is not taken into service."""
        if guard is None:
            return
        observation = Observer(self.state.spec, blocks=1, in_flight=1).observe(1000, NO_BLOCKS)
        deadline_s, guard.deadline_s = guard.deadline_s, TRIAL_S
        try:
            guard.decide(observation)
        except PolicyFailure as failure:
            raise PolicyError(f"{role} {failure}") from failure
        finally:
            guard.deadline_s = deadline_s
        guard.policy.reset(1, self.seed)

    def _warm_up(self) -> None:
        """Compile and load what the first request would otherwise wait for."""
        for role in ("policy", "fallback", "shadow", "canary"):
            self._try(role, getattr(self, role))
        state = self.state
        clock = state.observer.state.clock.copy()
        listeners, self.on_made, self.on_ended = (self.on_made, self.on_ended), [], []
        for name in ("first", "second"):
            self.schedule(Request(name, tokens=np.zeros(2 * state.block_tokens, np.uint32)))
        for reservation in list(state.reservations.values()):
            state.finished(reservation, float(state.clock["now_s"]), output_tokens=2)
        for p in range(len(state.prefills)):
            state.index.clear(p)
        state.observer.state.clock[:] = clock
        state.prefill["running_end_s"] = 0.0
        for column in ("stall_rate", "join_rate", "last_join_s", "updated_s"):
            state.decode[column] = 0.0
        self._explained.clear()
        self.on_made, self.on_ended = listeners
        for role in ("policy", "fallback", "shadow", "canary"):
            guard = getattr(self, role)
            if guard is not None:
                guard.policy.reset(1, self.seed)
