"""Every command of README.md and docs/ is run, or, where its page says why not, parsed by the program it calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import traces
from tests.documents import PAGES, ROOT, Session, blocks_of, check, inline_commands

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TRACE_REQUESTS = 1500
HURRIED = ("slow", "not run")
"""Marks of blocks that the quick tests only parse."""


def with_marks(page: str, *marks: str) -> bool:
    return any(block.mark in marks for block in blocks_of(ROOT / page))


def runs(page: str) -> bool:
    """Whether the quick tests run something of the page."""
    return any(
        not block.mark and (block.commands or (block.language == "python" and not block.title))
        for block in blocks_of(ROOT / page)
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for what readers have, small enough for tests."""
    file = tmp_path_factory.mktemp("trace") / "conversation_trace.jsonl"
    traces.save(traces.builtin("conversation").rows(0, TRACE_REQUESTS), file)
    return file


@pytest.fixture
def session(tmp_path: Path, trace: Path) -> Iterator[Session]:
    (tmp_path / trace.name).symlink_to(trace)
    made = Session(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("page", list(filter(runs, NAMES)))
def test_commands_run(page, session):
    for block in blocks_of(ROOT / page):
        if block.mark not in HURRIED:
            session.do(block)


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name in NAMES if with_marks(name, "slow")])
def test_slow_commands_run(page, session):
    for block in blocks_of(ROOT / page):
        if block.mark != "not run":
            session.do(block)


@pytest.mark.parametrize("page", NAMES)
def test_commands_parse(page):
    for block in blocks_of(ROOT / page):
        for command in block.commands if block.mark else ():
            try:
                check(command)
            except AssertionError as error:
                pytest.fail(f"{block.place}: {command}: {error}")
    for command in inline_commands(ROOT / page):
        try:
            check(command)
        except AssertionError as error:
            pytest.fail(f"{page}: `{command}`: {error}")


def test_what_cannot_be_is_noticed(tmp_path):
    for command in (
        "python leaderboard.py --polices conductor",
        "python train.py --step 10",
        "python serve_policy.py --gatway 127.0.0.1:1",
        "python serve_policy.py demo --workers",
        "python -m traces inform x",
        "python -m benchmarks.replay --trase x",
        "pip install -e '.[trane]'",
        "make rum",
        "kubectl rollout status deployment/conductr",
        "podman build -f deploy/Dockerfile .",
        "rm -rf x",
    ):
        with pytest.raises(AssertionError):
            check(command)
