"""Where tasks run that may run in any process: on a Ray cluster where one is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from .policy import PolicyError


@contextmanager
def far_executor(address: str | None, cpus: int) -> Iterator[Executor | None]:
    """An executor on the Ray cluster at `address`; empty: on one of this machine, with `cpus`; None: none.

    Raises:
        PolicyError: Ray is not installed, or no cluster is there.
    """
    if address is None:
        yield None
        return
    try:
        from .ray_cluster import RayExecutor, connected
    except ImportError as error:
        raise PolicyError(f"--ray needs {error.name}: pip install 'conductor-gym[rllib]'") from None
    with connected(address, cpus):
        yield RayExecutor()
