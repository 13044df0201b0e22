"""Which workers to leave alone for a while, by how the requests to them end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import aiohttp

from .legs.upstream import LegFailed, Upstream
from .workers import Worker

log = logging.getLogger(__name__)

MOST_FAILURES = 3  # in a row
PROBE_S, LONGEST_PROBE_S = 0.5, 8.0  # between two looks at a worker that is down; doubles up to the latter


class Circuit:
    """Takes a worker out after failures in a row, at once where nothing listens, and back when it is healthy again.

    Args:
        mark: told which worker may be chosen. known: whether a worker is still one of the cluster.
    """

    def __init__(self, upstream: Upstream, mark: Callable[[str, bool], None], known: Callable[[Worker], bool]) -> None:
        self._upstream = upstream
        self._mark = mark
        self._known = known
        self._failures: dict[str, int] = {}
        self._open: set[str] = set()

    def worked(self, worker: Worker) -> None:
        """A request to it went well."""
        self._failures.pop(worker.id, None)

    def failed(self, failure: LegFailed) -> None:
        """A request to it did not."""
        worker = failure.worker
        if not failure.elsewhere:  # its answer is that the request is wrong
            self.worked(worker)
            return
        count = self._failures[worker.id] = self._failures.get(worker.id, 0) + 1
        if (failure.refused or count >= MOST_FAILURES) and worker.id not in self._open:
            log.warning("worker %s is left alone: %s", worker.id, failure)
            self._open.add(worker.id)
            self._mark(worker.id, False)
            self._upstream.later(self._watch(worker))

    async def _watch(self, worker: Worker) -> None:
        wait_s = PROBE_S
        while self._known(worker):
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_PROBE_S)
            with suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
                await self._upstream.get(f"http://{worker.address}/health", PROBE_S)
                self._failures[worker.id] = MOST_FAILURES - 1  # the next failure takes it out again
                self._mark(worker.id, True)
                log.warning("worker %s is healthy again", worker.id)
                break
        self._open.discard(worker.id)
