"""The process of a submission: `python -m submissions.worker FOLDER POLICY MEMORY_BYTES CPU_S`, its channel on stdin.

What is trusted is imported first; then the sandbox is closed; then the submission is loaded. From then on nothing here
protects anything: whoever reads the answers has to check them (`submissions.isolated`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from envs.kernel.compile import cache_directory
from envs.simulator import empty_observation
from envs.state import Observation
from policies.artifact import compile_features, load_artifact

from .isolated import ACTIONS, ANSWER, DECIDE, FAILED, HEADER, MOST_TEXT, NO_SANDBOX, READY, ROOT
from .sandbox import SandboxError, lock_down


def main() -> None:
    folder, policy, memory_bytes, cpu_s = sys.argv[1:]
    channel = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    compile_features()
    readable = [Path(folder), *(ROOT / name for name in ("envs", "policies", "traces", "submissions"))]
    readable += [cache_directory("envs"), cache_directory("policies")]
    os.chdir(folder)
    try:
        lock_down(readable, memory_bytes=int(memory_bytes), cpu_s=int(cpu_s))
    except SandboxError as error:
        _answer(channel, NO_SANDBOX, str(error).encode()[:MOST_TEXT])
        return
    try:
        _serve(channel, _loaded(Path(folder), policy))
    except EOFError:
        return
    except BaseException as error:
        _answer(channel, FAILED, f"{type(error).__name__}: {error}".encode()[:MOST_TEXT])


def _loaded(folder: Path, policy: str) -> Any:
    """The submission's policy: a file, or an instance of its class."""
    file, _, attribute = policy.partition(":")
    if not attribute:
        return load_artifact(file)  # the working folder is the submission's
    sys.path.insert(0, str(folder))  # for the modules beside it
    spec = importlib.util.spec_from_file_location(Path(file).stem, folder / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    made = getattr(module, attribute)()
    if not callable(getattr(made, "decide", None)):
        raise TypeError(f"{attribute} has no decide(observation) method; see policies.Policy")
    return made


def _serve(channel: int, policy: Any) -> None:
    """Answer until the channel is closed."""
    _answer(channel, READY, bytes([bool(getattr(policy, "recheck", True))]))
    observation = empty_observation(0, 0, 0)
    while True:
        what, clusters, prefills, decodes, seed = HEADER.unpack(_read(channel, bytearray(HEADER.size)))
        if what == DECIDE:
            if observation.prefill.shape != (clusters, prefills) or observation.decode.shape[1] != decodes:
                observation = empty_observation(clusters, prefills, decodes)
            for table in observation:
                _read(channel, table.reshape(-1).view(np.uint8))
            _answer(channel, ACTIONS, _actions(policy, observation).tobytes())
        else:
            if hasattr(policy, "reset"):
                policy.reset(clusters, seed)
            _answer(channel, READY, b"\1")


def _actions(policy: Any, observation: Observation) -> np.ndarray:
    """What it decides, as int64[C]. That this is so is no more than a message for who made a mistake."""
    actions = policy.decide(observation)
    clusters = len(observation.request)
    found = f"{actions.dtype}{list(actions.shape)}" if isinstance(actions, np.ndarray) else type(actions).__name__
    if not isinstance(actions, np.ndarray) or actions.shape != (clusters,) or actions.dtype.kind not in "iu":
        nan = isinstance(actions, np.ndarray) and actions.dtype.kind == "f" and bool(np.isnan(actions).any())
        raise TypeError(f"decide() returned {found}{' with NaN' if nan else ''}; expected int64[{clusters}]")
    return actions.astype(np.int64, copy=False)


def _read(channel: int, buffer: Any) -> Any:
    """Fill a buffer from the channel."""
    view = memoryview(buffer)
    while len(view):
        count = os.readv(channel, [view])
        if not count:
            raise EOFError
        view = view[count:]
    return buffer


def _answer(channel: int, kind: int, data: bytes) -> None:
    rest = memoryview(ANSWER.pack(kind, len(data)) + data)
    while len(rest):
        rest = rest[os.write(channel, rest) :]


if __name__ == "__main__":
    main()
