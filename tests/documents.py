"""The commands of README.md and docs/: found in their pages, run in a folder, or held against the program they call.

In a page,

- a `console` block holds commands after `$ `; lines without it are output;
- a `python` block is run, a `yaml` one is text; with a title (```` ```python title="mine.py" ````) either is a file;
- `<!-- slow: WHY -->` before a block: run by the slow tests only; `<!-- not run: WHY -->`: never. The options of such
  commands are still parsed by the programs they call;
- a server in the foreground is waited for, then ended with Ctrl-C, a server with `&` when the page ends. Ports of this
  machine are exchanged for free ones.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import tyro
import yaml
from typer.core import TyperCommand, TyperGroup

from .runtime.backends import free_port

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>slow|not run): (?P<why>.+?) -->\n)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"(?<!`)`((?:python|pip|make) [^`]+)`(?!`)")
ADDRESS = re.compile(r"(127\.0\.0\.1|localhost):([1-9]\d*)")
SERVERS = (["python", "serve_policy.py"], ["python", "-m", "runtime.worker"])
DEFAULT_ADDRESSES = {  # where a command listens that does not say so
    "serve_policy.py demo": "--gateway 127.0.0.1:8000 --page 127.0.0.1:9090",
    "serve_policy.py": "--grpc 127.0.0.1:50051",
}
LONGEST_S = 300.0


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    mark: str
    language: str
    title: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

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
            *(found[part] or "" for part in ("mark", "language", "title", "text")),
        )
        for found in BLOCK.finditer(text)
    ]


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
    **dict.fromkeys(("curl", "envoy", "podman", "tensorboard", "."), _check_files),
}


def check(command: str) -> None:
    """Raise AssertionError where a command has an unknown program, option, target, resource or file."""
    words = [word for word in words_of(command) if word != "&"]
    assert words[0] in CHECKS, f"no way to check {words[0]!r}"
    CHECKS[words[0]](words[1:])


# --- commands that are run -----------------------------------------------------------------------------------------


@dataclass
class Session:
    """A reader at a prompt: files, commands and servers of one page, in one folder."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    servers: list[tuple[str, subprocess.Popen[bytes], Path]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("leaderboard.py", "replay.py", "train.py", "serve_policy.py", "deploy"):
            (self.folder / name).symlink_to(ROOT / name)

    @property
    def environment(self) -> dict[str, str]:
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": programs, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def here(self, text: str) -> str:
        """The text with free ports in place of this machine's."""

        def free(found: re.Match[str]) -> str:
            return f"127.0.0.1:{self.ports.setdefault(found[2], free_port())}"

        return ADDRESS.sub(free, text)

    def do(self, block: Block) -> None:
        """Write, run, or leave alone, as the block wants it."""
        if block.title:
            file = self.folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.here(block.text))
        elif block.language == "python":
            self._run(f"{shlex.quote(sys.executable)} -c {shlex.quote(self.here(block.text))}", block.place)
        for command in block.commands:
            self._command(command, block.place)

    def _command(self, command: str, place: str) -> None:
        words = words_of(command)
        program = words[: 3 if words[1:2] == ["-m"] else 2]
        if program not in SERVERS:
            self._run(self.here(command), place)
            return
        for name, addresses in DEFAULT_ADDRESSES.items():
            if name in command and addresses.split()[0] not in words:
                command = command.replace(name, f"{name} {addresses}")
                break
        self._start(self.here(command.rstrip("& ")), place)
        if words[-1] != "&":
            self._end(*self.servers.pop())

    def _run(self, command: str, place: str) -> None:
        ran = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=LONGEST_S,
        )
        assert ran.returncode == 0, f"{place}: {command}\nended with {ran.returncode}:\n{ran.stdout[-3000:]}"

    def _start(self, command: str, place: str) -> None:
        output = self.folder / f"server-{len(list(self.folder.glob('server-*')))}.txt"
        with output.open("wb") as sink:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment,
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.servers.append((f"{place}: {command}", server, output))
        for _, port in ADDRESS.findall(" ".join(words_of(command))):
            until = time.monotonic() + LONGEST_S
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                        break
                assert server.poll() is None, f"{place}: {command}\nended at once:\n{output.read_text()[-3000:]}"
                assert time.monotonic() < until, f"{place}: {command}\nnobody listens on port {port}"
                time.sleep(0.1)

    def _end(self, what: str, server: subprocess.Popen[bytes], output: Path) -> None:
        """Ctrl-C."""
        server.send_signal(signal.SIGINT)
        try:
            status = server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            raise AssertionError(f"{what}\ndoes not end after Ctrl-C") from None
        assert status in (0, 130), f"{what}\nended with {status} after Ctrl-C:\n{output.read_text()[-3000:]}"

    def close(self) -> None:
        """End what is left, the last one first."""
        while self.servers:
            self._end(*self.servers.pop())
