"""Commands that need vLLM workers, and what takes long on their pages, run as tests/test_docs.py runs the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.vllm_workers import VllmWorkers

from ..documents import ROOT, Block, Session, blocks_to_run, pages_with

PREFILL, DECODE = "192.0.2.1:8000", "192.0.2.2:8000"
"""Where the pages have two workers that are up."""


@contextmanager
def workers_of(block: Block, session: Session, environment: Path) -> Iterator[None]:
    """Workers run where a block's commands call for them, for as long as it does."""
    if not any(PREFILL in command for command in block.commands):
        yield
        return
    with VllmWorkers(1, 1, environment=environment) as pair:
        session.addresses |= {PREFILL: pair.address("p0"), DECODE: pair.address("d0")}
        yield


def run(page: str, mark: str, folder: Path, environment: Path) -> None:
    with Session(folder, clone=True) as session:
        for block in blocks_to_run(ROOT / page, mark):
            with workers_of(block, session, environment):
                session.do(block)


@pytest.mark.live
@pytest.mark.long
@pytest.mark.parametrize("page", pages_with("live"))
def test_commands_run(page, tmp_path, environment):
    run(page, "live", tmp_path, environment)


@pytest.mark.live
@pytest.mark.long
@pytest.mark.parametrize("page", [name for name in pages_with("live") if name in pages_with("long")])
def test_long_commands_run(page, tmp_path, environment):
    run(page, "long", tmp_path, environment)
