"""What the headers of an HTTP request say of it: SLOs, tenant and priority, under the names llm-d gave them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .request import RequestError

REQUEST_ID = "x-request-id"
DROPPED_REASON = "x-llm-d-request-dropped-reason"
PAIR = "x-conductor-pair"  # of an answer: ids of the workers that served it
PREFIX_HOLDER = "x-kv-cache-source-host-port"


def ttft_slo_s(headers: Mapping[str, str]) -> float | None:
    """Its TTFT SLO, where it has one of its own.

    Raises:
        RequestError: it is no time.
    """
    return _milliseconds(headers, "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")


def tbt_slo_s(headers: Mapping[str, str]) -> float | None:
    """Its TBT SLO, where it has one of its own.

    Raises:
        RequestError: it is no time.
    """
    return _milliseconds(headers, "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")


def tenant(headers: Mapping[str, str]) -> str:
    """Who is charged; "" where nobody is named."""
    return headers.get("x-llm-d-inference-fairness-id") or headers.get("x-gateway-inference-fairness-id") or ""


def priority(headers: Mapping[str, str], objectives: Mapping[str, int]) -> int:
    """Its priority: a number, or a name that `objectives` gives one.

    Raises:
        RequestError: it is no integer of 32 bits.
    """
    text = headers.get("x-request-priority")
    if text is None:
        return objectives.get(headers.get("x-llm-d-inference-objective", ""), 0)
    try:
        value = int(text[:12])
    except ValueError:
        value = 1 << 31
    if not -(1 << 31) <= value < 1 << 31 or len(text) > 12:
        raise RequestError(f"x-request-priority: expected an integer of 32 bits, found {text[:40]!r}")
    return value


def _milliseconds(headers: Mapping[str, str], *names: str) -> float | None:
    for name in names:
        text = headers.get(name)
        if text is None:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise RequestError(f"{name}: expected a positive number of milliseconds, found {text[:40]!r}")
        return value / 1000
    return None
