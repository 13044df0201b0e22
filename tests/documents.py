"""The commands of README.md and docs/: found in their pages, run in a folder, or held against the program they call.

In a page,

- a `console` block holds commands after `$ `; lines without it are output;
- a `python` block is run, a `yaml` one is text; with a title (```` ```python title="mine.py" ````) either is a file;
- `<!-- slow: WHY -->` before a block leaves it to the slow tests, `<!-- live: WHY -->` (it needs vLLM workers) and
  `<!-- long: WHY -->` (an hour, say) to `make test-long`; `<!-- not run: WHY -->` to nobody, for a reason in
  `NOT_RUN`. The quick tests have the options of all these commands parsed by the programs they call;
- replays through live workers are of a few requests (`LIVE_REQUESTS`);
- a server in the foreground is waited for, then ended with Ctrl-C, a server with `&` when the page ends. Addresses of
  this machine and those of examples (RFC 5737) are exchanged for free ones of this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self
from unittest import mock

import tyro
import yaml
from typer.core import TyperCommand, TyperGroup

import traces
from runtime.local_workers import listens

from .runtime.backends import free_port

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

RUN = {"": ("",), "slow": ("", "slow"), "live": ("", "live"), "long": ("", "live", "long")}
"""Marks of blocks, and those that a test of such blocks runs of their page: what has come before may be needed."""
NOT_RUN = {
    "builds an image": "no registry to take one from; tests/test_deploy.py reads the Containerfile",
    "needs a Kubernetes cluster": "tests/test_deploy.py reads the manifests",
    "downloads": "tests/traces/test_download.py runs it with a mirror of its own",
}
"""The only reasons to run a block nowhere, and what there is instead."""

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>slow|live|long|not run): (?P<why>.+?) -->\n)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"(?<!`)`((?:python|pip|make) [^`]+)`(?!`)")
EXAMPLE = r"192\.0\.2\.\d+"
ADDRESS = re.compile(rf"(127\.0\.0\.1|localhost|{EXAMPLE})(:| --port |, port_value: )([1-9]\d*)")
TRACE = "conversation_trace.jsonl"
QUICK_REQUESTS = 1500  # of the trace, where tests are in a hurry
LIVE_REQUESTS = 40  # of replays through live workers, that run as long as a trace does
LIVE_REPLAYS = (
    "python -m experiments sim_to_live",
    "python -m experiments live_rejection",
    "python -m benchmarks.gateway",
)
LONGEST_S = {"": 300.0, "slow": 300.0, "live": 1200.0, "long": 3 * 3600.0}  # of a command, by its block's mark


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    mark: str
    why: str
    language: str
    title: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether there is anything in it to run."""
        return bool(self.commands) or (self.language == "python" and not self.title)

    @property
    def commands(self) -> list[str]:
        """Those of a console block, each in one line."""
        if self.language != "console":
            return []
        joined = self.text.replace("\\\n", " ")
        return [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            *(found[part] or "" for part in ("mark", "why", "language", "title", "text")),
        )
        for found in BLOCK.finditer(text)
    ]


def pages_with(mark: str) -> list[str]:
    """Where something with this mark is to be run."""
    return [
        str(page.relative_to(ROOT))
        for page in PAGES
        if any(block.mark == mark and block.is_run for block in blocks_of(page))
    ]


def blocks_to_run(page: Path, mark: str) -> list[Block]:
    """Those of a test of what has this mark."""
    return [block for block in blocks_of(page) if block.mark in RUN[mark]]


def unknown_reasons(page: Path) -> list[str]:
    """Of blocks that are not run."""
    return [block.why for block in blocks_of(page) if block.mark == "not run" and block.why not in NOT_RUN]


def inline_commands(page: Path) -> list[str]:
    """Commands within sentences, `python ...`, each in one line."""
    prose = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(command.split()) for command in INLINE.findall(prose)]


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


# --- commands that are not run -------------------------------------------------------------------------------------


class Parsed(Exception):
    """A program has taken its arguments."""


@contextmanager
def _ends_when_parsed() -> Iterator[None]:
    """Programs raise `Parsed` where they would begin."""

    def stop(*_: object) -> None:
        raise Parsed

    parse, cli, invoke = argparse.ArgumentParser.parse_args, tyro.cli, TyperGroup.invoke

    def invoked(self: TyperGroup, context: object) -> object:
        return invoke(self, context) if getattr(context, "_protected_args", None) else stop()

    with ExitStack() as patches:
        for place, name, made in (
            (argparse.ArgumentParser, "parse_args", lambda self, *given: (parse(self, *given), stop())),
            (tyro, "cli", lambda *given, **named: (cli(*given, **named), stop())),
            (TyperCommand, "invoke", stop),
            (TyperGroup, "invoke", invoked),
        ):
            patches.enter_context(mock.patch.object(place, name, made))
        yield


def _check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "venv"]:
        return
    script = words[0]
    given = words[2:] if script == "-m" else words[1:]
    with _ends_when_parsed(), mock.patch.object(sys, "argv", [script, *given]):
        try:
            if script == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / script), run_name="__main__")
        except Parsed:
            return
        except SystemExit as end:
            if end.code == 0 and "--help" in given:
                return
            raise AssertionError(f"ended with {end.code} before its arguments were parsed") from None
    raise AssertionError("does not parse arguments")


def _check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    named = re.search(r"\[(.+)\]", words[-1])
    assert words[-1].split("[")[0] in (".", "conductor-gym"), words
    assert set(named[1].split(",") if named else ()) <= set(extras), f"extras are {', '.join(extras)}"


def _check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [word for word in words if "=" not in word and word not in targets] == [], (
        f"targets are {', '.join(targets)}"
    )


def _check_kubectl(words: list[str]) -> None:
    """Files exist; a resource is one of the manifests'."""
    manifests = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/conductor.yaml").read_text()))
    known = {f"{one['kind'].lower()}/{one['metadata']['name']}" for one in manifests}
    ports = {str(port["port"]) for one in manifests if one["kind"] == "Service" for port in one["spec"]["ports"]}
    if "-f" in words:
        assert (ROOT / words[words.index("-f") + 1]).is_file()
        return
    resources = [word.replace("deploy/", "deployment/") for word in words if re.fullmatch(r"[a-z]+/[\w-]+", word)]
    assert resources and set(resources) <= known, f"{resources}: the manifests have {known}"
    forwarded = [word.split(":")[1] for word in words if re.fullmatch(r"\d+:\d+", word)]
    assert set(forwarded) <= ports


def _check_files(words: list[str]) -> None:
    """Of a program that is not ours: files of the repository exist."""
    assert all((ROOT / word).exists() for word in words if word.startswith("deploy/")), words


CHECKS = {
    "python": _check_python,
    "pip": _check_pip,
    "make": _check_make,
    "kubectl": _check_kubectl,
    **dict.fromkeys(("curl", "mkdir", "podman", "tensorboard", "."), _check_files),
}


def check(command: str) -> None:
    """Raise AssertionError where a command has an unknown program, option, target, resource or file."""
    words = [word for word in words_of(command) if word != "&"]
    assert words[0] in CHECKS, f"no way to check {words[0]!r}"
    CHECKS[words[0]](words[1:])


# --- commands that are run -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A program that stays in the foreground.

    Args:
        begins: the words its commands begin with. options: added where a command has not the first of them; addresses
            in them are exchanged like others. listens, writes: an address that is not on its command line, and a file;
            it is up when they are there.
    """

    begins: str
    options: str = ""
    listens: str = ""
    writes: str = ""


SERVERS = (
    Server("python serve_policy.py demo", "--gateway 127.0.0.1:8000 --page 127.0.0.1:9090"),
    Server("python serve_policy.py", "--grpc 127.0.0.1:50051"),
    Server("python -m runtime.worker"),
    Server("python -m runtime.vllm_workers run", writes="cluster.yaml"),
    Server("tensorboard", "--host 127.0.0.1 --port 6006"),
    Server("envoy", "--disable-hot-restart", listens="127.0.0.1:10000"),
)


@dataclass
class Session:
    """A reader at a prompt: files and commands of one page, in one folder. `with` ends the servers.

    Args:
        folder: empty. clone: make it a clone of the repository, for commands that write into theirs or install it; else
            it has links to the programs.

    Attributes:
        addresses: of the page, and those that take their place.
        servers: those with `&`.
        activated: what goes before a command since a virtual environment was activated.
    """

    folder: Path
    clone: bool = False
    addresses: dict[str, str] = field(default_factory=dict)
    servers: ExitStack = field(default_factory=ExitStack)
    activated: str = ""

    def __enter__(self) -> Self:
        trace = _trace()
        if self.clone:
            clone_to(self.folder)
        else:
            trace = trace.rows(0, QUICK_REQUESTS)
            for name in ("leaderboard.py", "replay.py", "train.py", "serve_policy.py"):
                (self.folder / name).symlink_to(ROOT / name)
        traces.save(trace, self.folder / TRACE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.servers.close()

    @property
    def environment(self) -> dict[str, str]:
        """As readers have it: nothing of a make that runs these tests, and in a clone only what is installed."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        path = "" if self.clone else str(ROOT)
        return inherited | {"PATH": programs, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def here(self, text: str) -> str:
        """The text with free addresses of this machine in place of its own."""

        def free(found: re.Match[str]) -> str:
            host, between, port = found.groups()
            named = f"{host.replace('localhost', '127.0.0.1')}:{port}"
            address = self.addresses.setdefault(named, f"127.0.0.1:{free_port()}")
            return address.replace(":", between)

        return ADDRESS.sub(free, text)

    def do(self, block: Block) -> None:
        """Write, run, or leave alone, as the block wants it."""
        if block.title:
            file = self.folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.here(block.text))
        elif block.language == "python":
            self._run(f"python -c {shlex.quote(self.here(block.text))}", block)
        for command in block.commands:
            self._command(command, block)

    def _command(self, command: str, block: Block) -> None:
        words = words_of(command)
        if words[0] == "pip" and not self.activated:  # never into the environment that the tests run in
            self._command("python -m venv .venv", block)
            self._command(". .venv/bin/activate", block)
        if command.startswith(LIVE_REPLAYS):
            command = shlex.join([*words, "--requests", str(LIVE_REQUESTS)])
        server = next((one for one in SERVERS if words[: len(one.begins.split())] == one.begins.split()), None)
        if server is None:
            self._run(self.here(command), block)
            if words[0] == ".":
                self.activated += f"{command} && "
            return
        stays = words[-1] == "&"
        words = [self._exchanged(word) for word in words if word != "&"]
        if server.options and server.options.split()[0] not in words:
            words = [*server.begins.split(), *server.options.split(), *words[len(server.begins.split()) :]]
        up = self._up(server, self.here(shlex.join(words)), block)
        if stays:
            self.servers.enter_context(up)
        else:
            with up:
                pass

    def _exchanged(self, word: str) -> str:
        """Of a file in deploy/, the name of one with the session's addresses."""
        if not word.startswith("deploy/"):
            return word
        file = self.folder / Path(word).name
        file.write_text(self.here((ROOT / word).read_text()))
        return file.name

    def _started(self, command: str, output: int | BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-c", f"set -o pipefail; {self.activated}{command}"],
            cwd=self.folder,
            env=self.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # Tests that were started in the background ignore Ctrl-C, and whoever they start would, too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def _run(self, command: str, block: Block) -> None:
        with self._started(command, subprocess.PIPE) as process:
            try:
                said, _ = process.communicate(timeout=LONGEST_S[block.mark])
            except BaseException:  # too long, or whoever runs the tests has had enough
                os.killpg(process.pid, signal.SIGTERM)
                raise
        ended = f"{block.place}: {command}\nended with {process.returncode}:\n{said[-3000:].decode(errors='replace')}"
        assert process.returncode == 0, ended

    @contextmanager
    def _up(self, server: Server, command: str, block: Block) -> Iterator[None]:
        """It runs meanwhile, and ends with Ctrl-C."""
        what = f"{block.place}: {command}"
        output = self.folder / f"server-{len(list(self.folder.glob('server-*')))}.txt"
        with output.open("wb") as sink:
            process = self._started(f"exec {command}", sink)
        try:
            missing = {int(port) for _, _, port in ADDRESS.findall(f"{command} {self.here(server.listens)}")}
            until = time.monotonic() + LONGEST_S[block.mark]
            while missing or not (self.folder / server.writes).exists():
                assert process.poll() is None, f"{what}\nended at once:\n{output.read_text()[-3000:]}"
                assert time.monotonic() < until, f"{what}\nnobody listens on {missing}, or no {server.writes!r}"
                missing = {port for port in missing if not listens(f"127.0.0.1:{port}")}
                time.sleep(0.1)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                status = process.wait(30)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise AssertionError(f"{what}\ndoes not end after Ctrl-C") from error
            assert status in (0, 130), f"{what}\nended with {status} after Ctrl-C:\n{output.read_text()[-3000:]}"


@cache
def _trace() -> traces.Trace:
    """A stand-in for what readers have."""
    return traces.builtin("conversation")


def clone_to(folder: Path) -> None:
    """A clone of this repository, with what was changed in the working tree."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
