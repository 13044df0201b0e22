"""A network of its own, for tests of programs that listen on all interfaces, as Mooncake's clients do."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CLONE_NEWNET = 0x40000000  # <sched.h>
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1  # <linux/sockios.h>, <net/if.h>
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def own_network() -> Iterator[None]:
    """This thread, and all that it starts meanwhile, have a loopback interface and no other (network_namespaces(7)).

    Skips the test where that is not allowed: it takes root.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if _libc.unshare(CLONE_NEWNET):
            pytest.skip(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
        try:
            yield
        finally:
            if _libc.setns(before, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "the network is not to be had back")
    finally:
        os.close(before)
