"""A Ray cluster, joined or of this machine, and tasks on it. Every node needs this project at the same version."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, TypeVar

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported: it does not report its use

import ray
from ray._private import ray_constants

from .policy import PolicyError

T = TypeVar("T")
ANSWER_S = 5.0  # within which something must listen at --ray


@contextmanager
def connected(address: str, runners: int) -> Iterator[None]:
    """With the Ray cluster at `address` (auto, HOST:PORT or ray://HOST:PORT); empty: with one of its own.

    Raises:
        PolicyError: no Ray cluster is there, or one that cannot be joined.
    """
    for name in ("ray", "ray.rllib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    try:
        if address:
            _join(address, runners, quiet)
        else:
            # A cluster of one machine listens to nobody else. On Linux, Ray has no argument for that.
            os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
            ray_constants.ENABLE_RAY_CLUSTER = False
            ray.init(address="local", num_cpus=runners + 1, include_dashboard=False, **quiet)
        yield
    finally:
        ray.shutdown()


def _join(address: str, runners: int, quiet: Mapping[str, Any]) -> None:
    where = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if where:
        _knock(where)
    ray_constants.NUM_REDIS_GET_RETRIES = 5  # of a second each: somebody does listen
    try:
        ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise PolicyError(f"--ray {address}: {reason} (a cluster with tokens needs RAY_AUTH_MODE=token)") from None
    cpus = int(ray.cluster_resources().get("CPU", 0))
    if cpus < runners:
        print(f"waiting for {runners} CPUs: the Ray cluster has {cpus}", file=sys.stderr)


def _knock(address: str) -> None:
    """Whether something listens there: Ray itself would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise PolicyError(f"--ray {address}: expected auto, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as error:
        raise PolicyError(f"--ray {address}: no Ray cluster answers there: {error}") from None


class RayExecutor(Executor):
    """Tasks on the Ray cluster that is connected, one CPU each; as `concurrent.futures` has them on threads."""

    def __init__(self) -> None:
        self._run = ray.remote(num_cpus=1)(_run)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = self._run.remote(fn, *args, **kwargs).future()
        return future


def _run(work: Callable[..., T], *given: Any, **named: Any) -> T:
    return work(*given, **named)
