"""What the process of a submission may do: compute, and read its own files and Python's.

`lock_down` gives the rest up for this process, for good; no privilege is needed, none is left. Three means of Linux:

- seccomp, by libseccomp: a list of the system calls that are allowed. Not on it are sockets, new processes, programs,
  signals to others, shared memory; files can be opened for reading only. So nothing is written anywhere, and what the
  process takes in memory is its address space.
- resource limits: address space, processor seconds.
- Landlock, where the kernel has it: what may be read.

Without seccomp there is no sandbox, and nothing is run (`why_not`). Without Landlock a submission can read what its
user can, and cannot send it anywhere; `unlimited` says so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

ALLOWED = """
    access brk clock_getres clock_gettime clock_nanosleep close dup dup2 dup3 epoll_create1 epoll_ctl epoll_pwait
    epoll_wait exit exit_group faccessat faccessat2 fstat fstatfs futex getcpu getcwd getdents64 getegid geteuid getgid
    getpid getrandom getresgid getresuid getrlimit getrusage gettid gettimeofday getuid lseek lstat madvise mincore mmap
    mprotect mremap munmap nanosleep newfstatat pipe2 poll ppoll pread64 preadv pselect6 read readlink readlinkat readv
    restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn sched_getaffinity sched_yield select
    set_robust_list set_tid_address sigaltstack stat statfs statx sysinfo time times umask uname write writev
    """.split()  # noqa: SIM905
"""System calls without conditions; those that an architecture does not have are left out."""
MOST_FILES = 64
"""Descriptors that may be open at a time."""
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom", "/sys/devices/system/cpu")
"""What may be read besides Python's own folders: libraries, and what they look for when they are loaded."""

_PR_SET_PDEATHSIG, _PR_GET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 21, 38
_ALLOW, _ERRNO, _TSYNC = 0x7FFF0000, 0x00050000, 4
_EQUAL, _MASKED_EQUAL = 4, 7
_CLONE_THREAD = 0x00010000
_F_DUPFD_CLOEXEC = 1030
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights over files each version of Landlock knows; later ones know as many as the fifth."""


class SandboxError(OSError):
    """The sandbox cannot be closed; nothing may be run."""


class _Argument(ctypes.Structure):
    """struct scmp_arg_cmp"""

    _fields_ = [("index", ctypes.c_uint), ("compare", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    """struct landlock_path_beneath_attr"""

    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """Why there can be no sandbox on this machine; None where there can."""
    if sys.platform != "linux":
        return f"seccomp is of Linux, this is {sys.platform}"
    if _libc().prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        return "this kernel has no seccomp"
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return "there is no libseccomp.so.2 (apt install libseccomp2, dnf install libseccomp)"
    return None


def unlimited() -> str | None:
    """What the sandbox does not limit on this machine; None where it limits everything."""
    if _landlock_version() > 0:
        return None
    return "this kernel has no Landlock: a submission can read the files that you can, and cannot send them anywhere"


def _landlock_version() -> int:
    return int(_libc().syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION))


def lock_down(readable: Iterable[Path], *, memory_bytes: int, cpu_s: int) -> None:
    """Give up everything but computing and reading, for this process and for good.

    To be called with one thread, before any code of the submission is loaded.

    Args:
        readable: files and folders that may be read besides Python's and the system's libraries.
        memory_bytes: address space that may be taken on top of what is taken now.
        cpu_s: processor seconds after which the kernel kills the process.

    Raises:
        SandboxError: something of it cannot be had.
    """
    reason = why_not()
    if reason:
        raise SandboxError(reason)
    if len(os.listdir("/proc/self/task")) > 1:
        raise SandboxError("threads were started before the sandbox was closed")
    libc = _libc()
    _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")  # with the leaderboard it ends
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for limit, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MOST_FILES),
    ):
        resource.setrlimit(limit, (value, value))
    if _landlock_version() > 0:
        _restrict_reading(libc, [*readable, *map(Path, {sys.prefix, sys.base_prefix, *SYSTEM})])
    _drop_capabilities(libc)
    _restrict_calls()
    _try_what_is_forbidden()


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise SandboxError(code, f"{what}: {os.strerror(code)}")
    return result


def _restrict_reading(libc: ctypes.CDLL, readable: Iterable[Path]) -> None:
    """Landlock: of all files only these can be read, and none written, made or removed."""
    rights = ctypes.c_uint64((1 << _RIGHTS[min(_landlock_version(), max(_RIGHTS))]) - 1)
    size = ctypes.c_size_t(ctypes.sizeof(rights))
    rules = _check(libc.syscall(_LANDLOCK_CREATE, ctypes.byref(rights), size, 0), "landlock_create_ruleset")
    for path in readable:
        if not path.exists():
            continue
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | _READ_DIRECTORY if path.is_dir() else _READ_FILE
        rule = ctypes.byref(_PathBeneath(allowed, opened))
        _check(libc.syscall(_LANDLOCK_ADD, rules, _LANDLOCK_PATH_BENEATH, rule, 0), "landlock_add_rule")
        os.close(opened)
    _check(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Root without its capabilities is a user as any other; others have none to drop."""
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(libc.capset(version_3, (ctypes.c_uint32 * 6)()), "capset")


def _restrict_calls() -> None:
    """seccomp: every other system call fails with EPERM."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    rules = ctypes.c_void_p(library.seccomp_init(_ERRNO | errno.EPERM))

    def add(action: int, name: str, *arguments: _Argument) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        given = (_Argument * len(arguments))(*arguments)
        if number < 0:
            return  # not of this architecture
        code = library.seccomp_rule_add_array(rules, ctypes.c_uint32(action), number, len(arguments), given)
        if code < 0:
            raise SandboxError(-code, f"seccomp rule of {name}: {os.strerror(-code)}")

    for name in ALLOWED:
        add(_ALLOW, name)
    not_reading = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
    add(_ALLOW, "open", _Argument(1, _MASKED_EQUAL, not_reading, os.O_RDONLY))
    add(_ALLOW, "openat", _Argument(2, _MASKED_EQUAL, not_reading, os.O_RDONLY))
    add(_ALLOW, "clone", _Argument(0, _MASKED_EQUAL, _CLONE_THREAD, _CLONE_THREAD))  # threads
    add(_ERRNO | errno.ENOSYS, "clone3")  # its flags cannot be seen; the C library takes clone then
    add(_ALLOW, "prlimit64", _Argument(0, _EQUAL, 0, 0))  # of this process
    for command in (*range(5), _F_DUPFD_CLOEXEC):  # not those that have signals sent
        add(_ALLOW, "fcntl", _Argument(1, _EQUAL, command, 0))
    library.seccomp_attr_set(rules, _TSYNC, ctypes.c_uint32(1))
    code = library.seccomp_load(rules)
    if code < 0:
        raise SandboxError(-code, f"seccomp_load: {os.strerror(-code)}")


def _try_what_is_forbidden() -> None:
    """Whether the sandbox holds, found by trying it."""
    for what, attempt in (
        ("a socket can be opened", socket.socket),
        ("a file can be written", lambda: os.open(os.devnull, os.O_WRONLY)),
        ("a signal can be sent", lambda: os.kill(os.getpid(), 0)),
    ):
        try:
            attempt()
        except PermissionError:
            continue
        raise SandboxError(f"the sandbox does not hold: {what}")
