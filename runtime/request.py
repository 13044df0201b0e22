"""A request to be scheduled, and the answer: where it goes, or why it goes nowhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from envs.state import Source

from .workers import Worker


class RequestError(ValueError):
    """A request that cannot be: the message names the field and what was expected."""


class Reason(StrEnum):
    """Why a request goes nowhere; the words of the field's `x-llm-d-request-dropped-reason` where it has one."""

    SATURATED = "rejected-saturated"  # no SLO can be met by the forecast: early rejection
    TENANT_SHARE = "rejected-tenant-share"  # saturated, and its tenant has had more than its share
    NO_ENDPOINTS = "rejected-no-endpoints"  # nothing eligible is up
    RECHECK = "rejected-recheck"  # the decode worker cannot meet the TBT SLO any more, now that the KV is there
    TOO_LARGE = "rejected-too-large"  # no decode instance could ever hold it
    SHUTTING_DOWN = "rejected-shutting-down"
    QUEUE_FULL = "rejected-queue-full"  # the sidecar itself is overloaded

    @property
    def http_status(self) -> int:
        """The HTTP status a gateway answers with."""
        return _HTTP_STATUS.get(self, 503)


_HTTP_STATUS = {Reason.SATURATED: 429, Reason.TENANT_SHARE: 429, Reason.RECHECK: 429, Reason.TOO_LARGE: 400}


@dataclass(slots=True)
class Request:
    """What is known of a request when it arrives.

    The prompt is given as `tokens`, or as `hashes` (chained block hashes, `runtime.block_hash`) with `input_tokens`,
    or by its length alone (then nothing is known to be reusable).

    Args:
        request_id: unique among the requests in flight.
        tokens: uint32[n], the prompt. hashes: uint64[m]. input_tokens: length; taken from `tokens` where given.
        lora_name, cache_salt: equal prompts share cached prefixes only where these are equal too.
        namespace: of tokens that are no token ids of the engine (text cut in pieces), so that the two never meet.
        ttft_slo_s, tbt_slo_s: the SLOs; the cluster's where None.
        tenant: who is charged. priority: higher goes first when the cluster is full; below 0 is shed first.
        candidates: addresses (host:port) of decode instances that may be chosen; all where None.
        arrival_s: time of arrival on the state's clock; None is now.
        lease_s: for how long the reservation lives without a report; None takes the configured value.
        reported: whether `Report`s will follow. Where not, the reservation goes by what was predicted.
        dry_run: decide, but reserve nothing.
        pair: ids of the prefill and the decode worker it goes to, whatever the policy says: another attempt at a
            request that was decided on already, and is not counted or logged as another decision.
    """

    request_id: str
    tokens: NDArray[np.uint32] | None = None
    hashes: NDArray[np.uint64] | None = None
    input_tokens: int = 0
    lora_name: str = ""
    cache_salt: str = ""
    namespace: str = ""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    tenant: str = ""
    priority: int = 0
    candidates: frozenset[str] | None = None
    arrival_s: float | None = None
    lease_s: float | None = None
    reported: bool = True
    dry_run: bool = False
    pair: tuple[str, str] | None = None


@dataclass(slots=True)
class Assignment:
    """Where a request goes. `fallbacks` are other (prefill, decode) pairs, best first."""

    request_id: str
    prefill: Worker
    decode: Worker
    source: Source
    holder: Worker | None  # who has the prefix that is to be fetched
    input_tokens: int
    reused_tokens: int
    predicted_ttft_s: float
    predicted_tbt_s: float
    lease_s: float
    policy: str
    fell_back: str = ""  # why the fallback policy decided; "" where the policy itself did
    fallbacks: tuple[tuple[Worker, Worker], ...] = field(default=())


@dataclass(slots=True)
class Rejection:
    """Why a request goes nowhere, and when to try again."""

    request_id: str
    reason: Reason
    message: str
    retry_after_s: float = 0.0
    predicted_ttft_s: float = float("nan")  # the least that was to be had
    predicted_tbt_s: float = float("nan")
    policy: str = ""
    fell_back: str = ""
