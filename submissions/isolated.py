"""A submission as a policy of the leaderboard: it decides in a process of its own, and the simulator runs in ours.

Observations go to the process (`submissions.worker`), one whole number for each cluster comes back; there is nothing
else that it could have a say in. What comes back is of a known size, read as numbers, checked against the mask.

A request is `HEADER` (what, clusters, prefills, decodes, seed), followed by the tables of the observation where one is
asked about. An answer is `ANSWER` (kind, bytes) and so many bytes.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from envs.state import Observation, Source

from .folder import Submission, printable

HEADER = struct.Struct("<5q")
RESET, DECIDE = 1, 2
ANSWER = struct.Struct("<2q")
ACTIONS, READY, FAILED, NO_SANDBOX = 1, 2, 3, 4
MOST_TEXT = 2000
"""Bytes of an error's text."""
CHECKED_DECISIONS = 1000
"""Decisions of its first replay that a submission makes twice, in two processes."""
ROOT = Path(__file__).resolve().parents[1]


class Limits(NamedTuple):
    """What a submission may take. A decision is one call of `decide`, for a batch of clusters."""

    start_s: float = 60.0
    """Until it is loaded and reset, of each process."""
    decision_s: float = 5.0
    total_s: float = 3600.0
    """Start and decisions of the whole run, processes side by side counted each."""
    memory_gib: float = 2.0

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Limits from `name=number,...`.

        Raises:
            ValueError: an unknown name, or no number above 0.
        """
        given = {}
        for piece in filter(None, text.split(",")):
            name, _, number = piece.partition("=")
            if name not in cls._fields:
                raise ValueError(f"no limit is called {name!r}; there are {', '.join(cls._fields)}")
            given[name] = float(number)
            if not 0 < given[name] < 1e9:
                raise ValueError(f"{name}={number}; expected a number above 0")
        return cls(**given)

    def __str__(self) -> str:
        return ",".join(f"{name}={value:g}" for name, value in self._asdict().items())


class Disqualified(ValueError):
    """What a submission did that disqualifies it."""


class NoSandbox(OSError):
    """The sandbox could not be closed; the submission was not loaded."""


class Account:
    """Seconds that a submission took, over all its processes."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.spent_s = 0.0
        self._lock = threading.Lock()

    def charge(self, seconds: float) -> None:
        """Raises `Disqualified` where it has taken more than it may."""
        with self._lock:
            self.spent_s += seconds
            if self.spent_s > self.limits.total_s:
                raise Disqualified(f"took more than {self.limits.total_s:g} s in all")


class IsolatedPolicy:
    """A submission in a process of its own, a `Policy`; to be closed.

    Args:
        submission: whose code or file it loads.
        account: what it may take, and has.

    Raises:
        Disqualified: it cannot be loaded within the limits. So raise `reset` and `decide`, and end the process.
        NoSandbox: nothing was loaded.
    """

    def __init__(self, submission: Submission, account: Account) -> None:
        self.name = submission.name
        self.account = account
        ours, theirs = socket.socketpair()
        limits = account.limits
        memory_bytes = int(limits.memory_gib * (1 << 30))
        cpu_s = int(limits.start_s + limits.total_s) + 1
        self._channel = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "submissions.worker", str(submission.folder.resolve()),
                 submission.metadata.policy, str(memory_bytes), str(cpu_s)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                cwd="/",  # libraries look for their configuration where they are imported
                start_new_session=True,
            )  # fmt: skip
        try:
            answer = self._answered(b"", limits.start_s, "to load", READY, size=1)
        except BaseException:
            self.close()
            raise
        self.recheck = answer != b"\0"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and all that it started."""
        self._channel.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def reset(self, clusters: int, seed: int) -> None:
        request = HEADER.pack(RESET, clusters, 0, 0, seed)
        self._answered(request, self.account.limits.start_s, "to reset", READY, size=1)

    def decide(self, observation: Observation) -> NDArray[np.int64]:
        """Actions int64[C], allowed by the masks."""
        clusters, prefills = observation.prefill.shape
        decodes = observation.decode.shape[1]
        tables = (np.ascontiguousarray(table).tobytes() for table in observation)
        request = b"".join((HEADER.pack(DECIDE, clusters, prefills, decodes, 0), *tables))
        limit_s = self.account.limits.decision_s
        answer = self._answered(request, limit_s, "for a decision", ACTIONS, size=8 * clusters)
        actions = np.frombuffer(answer, np.int64)
        _check_allowed(actions, observation)
        return actions

    def _answered(self, request: bytes, limit_s: float, what: str, expected: int, *, size: int) -> bytes:
        """The answer to a request, of a kind and size that are expected."""
        start = time.monotonic()
        deadline = start + limit_s
        try:
            self._channel.settimeout(limit_s)
            self._channel.sendall(request)
            kind, count = ANSWER.unpack(self._received(ANSWER.size, deadline))
            if kind in (FAILED, NO_SANDBOX) and 0 <= count <= MOST_TEXT:
                text = printable(self._received(count, deadline).decode(errors="replace"))
                raise NoSandbox(text) if kind == NO_SANDBOX else Disqualified(text)
            if kind != expected or count != size:
                raise Disqualified("its process answered with something that is no answer")
            return self._received(size, deadline)
        except TimeoutError:
            raise Disqualified(f"took more than {limit_s:g} s {what}") from None
        except (ConnectionError, EOFError):
            raise Disqualified(self._ended()) from None
        finally:
            self.account.charge(time.monotonic() - start)

    def _received(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._channel.settimeout(left_s)
            piece = self._channel.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _ended(self) -> str:
        """How the process came to its end."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"


class Twins:
    """A submission in two processes that are asked the same, for as long as it takes to believe it deterministic."""

    def __init__(self, submission: Submission, account: Account) -> None:
        self.first = IsolatedPolicy(submission, account)
        try:
            self.second = IsolatedPolicy(submission, account)
        except BaseException:
            self.first.close()
            raise
        self.name, self.recheck = self.first.name, self.first.recheck
        self._asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.first.close()
        self.second.close()

    def reset(self, clusters: int, seed: int) -> None:
        self.first.reset(clusters, seed)
        self.second.reset(clusters, seed)

    def decide(self, observation: Observation) -> NDArray[np.int64]:
        actions = self.first.decide(observation)
        if self._asked < CHECKED_DECISIONS:
            if not np.array_equal(actions, self.second.decide(observation)):
                raise Disqualified(
                    f"is not deterministic: two processes with the same seed chose otherwise in decision {self._asked}"
                )
            self._asked += 1
        return actions


def _environment() -> dict[str, str]:
    """What its process knows of ours: where the kernels are cached."""
    kept = {name: os.environ[name] for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME") if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    fixed = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
    return {**kept, **threads, **fixed}


def _check_allowed(actions: NDArray[np.int64], observation: Observation) -> None:
    """Whether the masks allow these actions; rejecting always is."""
    prefills, decodes = observation.prefill.shape[1], observation.decode.shape[1]
    largest = prefills * decodes * len(Source)
    outside = (actions < 0) | (actions > largest)
    if outside.any():
        raise Disqualified(f"returned action {actions[outside][0]}; expected 0 .. {largest}")
    clusters = np.flatnonzero(actions)
    pair, source = np.divmod(actions[clusters] - 1, len(Source))
    prefill, decode = np.divmod(pair, decodes)
    allowed = (observation.prefill_mask[clusters, prefill, source] != 0) & (
        observation.decode_mask[clusters, decode] != 0
    )
    if not allowed.all():
        i = int(np.argmin(allowed))
        raise Disqualified(
            f"chose prefill {prefill[i]}, decode {decode[i]}, {Source(int(source[i])).name.lower()}, "
            "which the masks of the observation do not allow"
        )
