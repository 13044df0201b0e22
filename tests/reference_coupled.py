"""The slow, plain reading of docs/physics.md, "Coupled instances".

One iteration after the other, every token's time kept, room counted anew whenever it matters. It shares no code with
`envs/`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.reference_simulator import Request, tail_mean


@dataclass(eq=False)
class Job:
    """A request on its instance."""

    index: int
    request: Request
    blocks: list[int]  # empty without a prefix cache
    outcome: dict[str, Any]
    done: int = 0  # tokens of the prompt that are reused or computed
    token_times: list[float] = field(default_factory=list)

    @property
    def n(self) -> int:
        return self.request.input_tokens

    @property
    def o(self) -> int:
        return self.request.output_tokens

    @property
    def context(self) -> int:
        return self.n + len(self.token_times) - 1


class Instance:
    """One coupled instance."""

    def __init__(self, parameters: Mapping[str, Any], block_tokens: int, tail_share: float, seen: Counter[str]) -> None:
        self.x = dict(parameters)
        self.block_tokens = block_tokens
        self.tail_share = tail_share
        self.seen = seen
        self.waiting: list[Job] = []
        self.prefilling: list[Job] = []
        self.members: list[Job] = []  # in order of joining
        self.resident: set[int] = set()
        self.releases: list[list[int]] = []  # oldest first; a block is only in the last that covered it
        self.end_s: float | None = None  # of the iteration under way; None: idle
        self.pieces: list[tuple[Job, int]] = []  # of it: how many tokens of whose prompt
        self.gives_tokens = False  # it

    @property
    def running(self) -> list[Job]:
        return self.prefilling + self.members

    @property
    def outstanding(self) -> int:
        return len(self.waiting) + len(self.running)

    # Room

    def blocks_of(self, request: Request) -> list[int]:
        return list(request.blocks) if self.x["prefix_cache"] else []

    def own(self, request: Request) -> int:
        held = len(self.blocks_of(request)) * self.block_tokens
        return max(0, request.input_tokens - held) + request.output_tokens

    def could_run(self, request: Request) -> bool:
        held = len(self.blocks_of(request)) * self.block_tokens
        return bool(held + self.own(request) <= self.x["kv_capacity_tokens"])

    def in_use(self) -> set[int]:
        return {block for job in self.running for block in job.blocks}

    def taken(self) -> int:
        blocks = len(self.in_use() | self.resident) * self.block_tokens
        return blocks + sum(self.own(job.request) for job in self.running)

    def fits(self, job: Job) -> bool:
        if len(self.running) >= self.x["max_batch"]:
            return False
        used = self.in_use()
        blocks = len(used) + len([block for block in job.blocks if block not in used])
        own = sum(self.own(other.request) for other in self.running) + self.own(job.request)
        return bool(blocks * self.block_tokens + own <= self.x["kv_capacity_tokens"])

    def evict_one(self) -> None:
        used = self.in_use()
        for release in self.releases:
            for block in reversed(release):
                if block in self.resident and block not in used:
                    self.resident.remove(block)
                    self.seen["eviction"] += 1
                    return
                if block in self.resident:
                    self.seen["eviction skips a block in use"] += 1
        raise AssertionError("it fitted, yet there is nothing to evict")

    def release(self, blocks: Sequence[int]) -> None:
        covered = set(blocks)
        self.releases = [[b for b in older if b not in covered] for older in self.releases]
        self.releases.append(list(blocks))

    # Start, end, completion

    def start(self, job: Job, now_s: float) -> None:
        self.waiting.remove(job)
        k = 0
        while k < len(job.blocks) and job.blocks[k] in self.resident:
            k += 1
        job.done = min(k * self.block_tokens, job.n - 1) if k else 0
        self.seen["reuse"] += k > 0
        self.prefilling.append(job)
        while self.taken() > self.x["kv_capacity_tokens"]:
            self.evict_one()
        job.outcome |= {"prefill_start_s": now_s, "reused_tokens": job.done, "prefill_s": 0.0}

    def end_prefill(self, job: Job, now_s: float) -> None:
        self.prefilling.remove(job)
        self.resident |= set(job.blocks)
        job.token_times.append(now_s)
        job.outcome |= {"prefill_end_s": now_s, "ttft_s": now_s - job.request.arrival_s}
        if job.o == 1:
            self.complete(job, now_s, 0.0, 0.0)
        else:
            job.outcome |= {"kv_ready_s": now_s, "join_s": now_s}
            self.members.append(job)

    def complete(self, job: Job, now_s: float, tbt_s: float, tbt_mean_s: float) -> None:
        self.release(job.blocks)
        job.outcome |= {"status": "completed", "finish_s": now_s, "tbt_s": tbt_s, "tbt_mean_s": tbt_mean_s}

    # Iterations

    def step(self) -> float:
        if not self.members:
            return 0.0
        context = sum(job.context for job in self.members)
        x = self.x
        return float(x["step_base_s"] + x["step_request_s"] * len(self.members) + x["step_token_s"] * context)

    def work(self, start: int, stop: int) -> float:
        return float(self.x["linear_s"] * (stop - start) + self.x["quadratic_s"] * (stop**2 - start**2))

    def arrive(self, job: Job, now_s: float) -> None:
        self.waiting.append(job)
        if self.end_s is None:
            self.begin_iteration(now_s)

    def begin_iteration(self, now_s: float) -> None:
        blocking = self.x["chunk_tokens"] == 0
        room = math.inf if blocking else self.x["chunk_tokens"]
        self.pieces = []
        if self.prefilling:
            (job,) = self.prefilling
            self.pieces.append((job, min(room, job.n - job.done)))
            room -= self.pieces[-1][1]
            self.seen["prefill goes on"] += 1
        while room > 0 and self.waiting and self.fits(self.waiting[0]):
            job = self.waiting[0]
            self.start(job, now_s)
            self.pieces.append((job, min(room, job.n - job.done)))
            room -= self.pieces[-1][1]
            if blocking:
                break
        self.seen["several pieces"] += len(self.pieces) > 1
        self.seen["the first that waits does not fit"] += bool(self.waiting) and not self.fits(self.waiting[0])
        self.gives_tokens = bool(self.members) and not (blocking and self.pieces)
        self.seen["a prefill stalls members"] += bool(self.members and blocking and self.pieces)
        if not self.pieces and not self.members:
            self.end_s = None
            return
        duration = self.step() if self.gives_tokens else 0.0
        for i, (job, tokens) in enumerate(self.pieces):
            seconds = self.work(job.done, job.done + tokens) + (self.x["base_s"] if i == 0 else 0.0)
            job.outcome["prefill_s"] += seconds
            duration += seconds
        self.end_s = now_s + duration

    def end_iteration(self) -> None:
        now_s = self.end_s
        assert now_s is not None
        if self.gives_tokens:
            for job in list(self.members):
                job.token_times.append(now_s)
                if len(job.token_times) == job.o:
                    self.members.remove(job)
                    gaps = [b - a for a, b in zip(job.token_times, job.token_times[1:], strict=False)]
                    self.complete(job, now_s, tail_mean(gaps, self.tail_share), sum(gaps) / len(gaps))
        for job, tokens in self.pieces:
            job.done += tokens
            if job.done == job.n:
                self.end_prefill(job, now_s)
        self.begin_iteration(now_s)
        assert self.taken() <= self.x["kv_capacity_tokens"]


class ReferenceCoupled:
    """Replays requests on coupled instances; `outcomes` has one dictionary per request."""

    def __init__(
        self, cluster: Mapping[str, Any], instances: Sequence[Mapping[str, Any]], requests: Sequence[Request]
    ) -> None:
        self.x = dict(cluster)
        self.seen: Counter[str] = Counter()
        share = cluster["tbt_tail_share"]
        self.instances = [Instance(x, cluster["block_tokens"], share, self.seen) for x in instances]
        self.requests = requests
        self.outcomes: list[dict[str, Any]] = []

    def advance(self, until_s: float) -> None:
        """All iterations that end by `until_s`. Instances have nothing in common, so one after the other."""
        for instance in self.instances:
            while instance.end_s is not None and instance.end_s <= until_s:
                instance.end_iteration()

    def replay(self) -> None:
        for index, request in enumerate(self.requests):
            self.advance(request.arrival_s)
            outcome: dict[str, Any] = {"status": "open", "instance": -1, "reused_tokens": 0}
            self.outcomes.append(outcome)
            able = [i for i, instance in enumerate(self.instances) if instance.could_run(request)]
            if not able:
                outcome["status"] = "rejected_at_arrival"
                self.seen["rejected"] += 1
                continue
            i = min(able, key=lambda i: (self.instances[i].outstanding, i))
            outcome["instance"] = i
            instance = self.instances[i]
            instance.arrive(Job(index, request, instance.blocks_of(request), outcome), request.arrival_s)
        self.advance(math.inf)
        for outcome in self.outcomes:
            outcome["good"] = int(
                outcome["status"] == "completed"
                and outcome["ttft_s"] <= self.x["ttft_slo_s"]
                and outcome["tbt_s"] <= self.x["tbt_slo_s"]
            )
