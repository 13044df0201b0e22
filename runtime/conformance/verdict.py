"""Trying cases on a target, and what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc

from .cases import CASES, MUST, Case
from .wire import Failure, Skip, Target


async def _try(target: Target, one: Case) -> dict[str, Any]:
    """A case's result."""
    result: dict[str, Any] = {
        "name": one.name,
        "level": one.level,
        "status": "passed",
        "requirement": one.requirement,
        "source": one.source,
        "expected": None,
        "found": None,
    }
    started = time.perf_counter()
    try:
        await asyncio.wait_for(one.run(target), 20 * target.timeout_s)
    except Skip as reason:
        result |= {"status": "skipped", "found": str(reason)}
    except Failure as failure:
        result |= {"status": "failed", "expected": failure.expected, "found": failure.found}
    except TimeoutError:
        result |= {"status": "failed", "expected": "an answer in time", "found": "none"}
    except grpc.aio.AioRpcError as error:
        found = f"gRPC status {error.code().name}: {error.details()}"
        result |= {"status": "failed", "expected": "an answer", "found": found}
    result["seconds"] = round(time.perf_counter() - started, 4)
    return result


async def try_cases(target: Target, chosen: Sequence[Case] = CASES) -> list[dict[str, Any]]:
    """The results of cases, one after another.

    Raises:
        ConnectionError: the target cannot be reached.
    """
    await target.connect()
    try:
        return [await _try(target, one) for one in chosen]
    finally:
        await target.close()


def report(address: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """What is printed as JSON."""
    statuses = [result["status"] for result in results]
    return {
        "target": address,
        "passed": statuses.count("passed"),
        "failed": statuses.count("failed"),
        "skipped": statuses.count("skipped"),
        "failed_must": sum(result["status"] == "failed" and result["level"] == MUST for result in results),
        "cases": results,
    }
