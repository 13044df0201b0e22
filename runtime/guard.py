"""`Guard`: a policy that cannot harm. What raises, hangs or answers nonsense is a `PolicyFailure`, at once.

A compiled heuristic runs where it is called, and has no deadline: it is what would be fallen back to. An exported
network runs there as well, and its answer does not count where it took too long. Anything else runs in a thread of
its own, and is waited for no longer than its deadline; while a call that missed it still runs, the policy counts as
hung and is not asked again.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import numpy as np

from envs.state import Observation
from policies import CompiledPolicy, Policy, make_policy


class PolicyFailure(Exception):
    """A policy gave no usable decision. `cause` is one of error, deadline, hung, invalid."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Guard:
    """Decide by a policy within a deadline.

    Args:
        name: of the policy (`policies.make_policy`). deadline_s: most seconds for a decision. seed: of its randomness.

    Raises:
        PolicyError: there is no such policy.
    """

    def __init__(self, name: str, *, deadline_s: float = 0.005, seed: int = 0) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self.policy: Policy = make_policy(name)
        self.policy.reset(1, seed)
        self.heuristic = isinstance(self.policy, CompiledPolicy)
        self.inline = self.heuristic or bool(getattr(self.policy, "bounded", False))
        self._worker: _Worker | None = None

    def decide(self, observation: Observation) -> int:
        """The action, as `envs.kernel.replay.step` takes it: 0 rejects, else 1 + (prefill D + decode) 3 + source.

        Raises:
            PolicyFailure: it raised, took too long, or its action is none that the masks allow.
        """
        if isinstance(self.policy, CompiledPolicy):
            try:
                return self.policy.decide_one(observation)
            except Exception as error:
                raise PolicyFailure("error", f"{self.name}: {type(error).__name__}: {error}") from error
        started = time.perf_counter()
        if self.inline:
            try:
                actions = self.policy.decide(observation)
            except Exception as error:
                raise PolicyFailure("error", f"{self.name}: {type(error).__name__}: {error}") from error
        else:
            if self._worker is None:
                self._worker = _Worker(self.policy)
            actions = self._worker.decide(observation, self.deadline_s, self.name)
        spent = time.perf_counter() - started
        if spent > self.deadline_s:
            raise PolicyFailure("deadline", f"{self.name}: {spent * 1e3:.1f} ms, at most {self.deadline_s * 1e3:g} ms")
        return self._checked(actions, observation)

    def _checked(self, actions: Any, observation: Observation) -> int:
        try:
            value = float(np.asarray(actions).reshape(-1)[0])
            action = int(value)
        except (TypeError, ValueError, IndexError, OverflowError):
            raise PolicyFailure("invalid", f"{self.name}: expected one action, found {actions!r}") from None
        decodes = observation.decode.shape[1]
        if value != action or not 0 <= action <= 3 * decodes * observation.prefill.shape[1]:
            raise PolicyFailure("invalid", f"{self.name}: no such action: {value!r}")
        if action:
            pair, source = divmod(action - 1, 3)
            p, d = divmod(pair, decodes)
            if not (observation.prefill_mask[0, p, 0] and observation.decode_mask[0, d]):
                raise PolicyFailure("invalid", f"{self.name}: chose prefill {p}, decode {d}, which may not be chosen")
            if not observation.prefill_mask[0, p, source]:
                return action - source  # nothing to fetch or recompute there: the same as using what is local
        return action

    def close(self) -> None:
        """End its thread, once the call in it returns."""
        if self._worker is not None:
            self._worker.calls.put(None)


class _Worker:
    """A thread that decides."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.busy = False  # a call that was given up still runs
        threading.Thread(target=self._run, name="policy", daemon=True).start()

    def _run(self) -> None:
        while (observation := self.calls.get()) is not None:
            try:
                answer: Any = self.policy.decide(observation)
            except BaseException as error:
                answer = error
            self.answers.put(answer)

    def decide(self, observation: Observation, deadline_s: float, name: str) -> Any:
        if self.busy:
            try:
                self.answers.get_nowait()  # of the call that was given up
            except queue.Empty:
                raise PolicyFailure("hung", f"{name}: its last decision is still not made") from None
            self.busy = False
        # a copy: it may go on reading after the deadline, when the next request is observed
        self.calls.put(Observation(*(table.copy() for table in observation)))
        try:
            answer = self.answers.get(timeout=deadline_s)
        except queue.Empty:
            self.busy = True
            raise PolicyFailure("deadline", f"{name}: no decision within {deadline_s * 1e3:g} ms") from None
        if isinstance(answer, BaseException):
            raise PolicyFailure("error", f"{name}: {type(answer).__name__}: {answer}") from answer
        return answer
