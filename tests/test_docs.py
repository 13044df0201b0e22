"""Every command of README.md and docs/ is run, now or by slower tests, and where its page says which, parsed as well.

Pages with vLLM workers are those of tests/live/test_docs.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.documents import (
    NOT_RUN,
    PAGES,
    ROOT,
    Session,
    blocks_of,
    blocks_to_run,
    check,
    inline_commands,
    pages_with,
    unknown_reasons,
)
from tests.network import own_network

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def run(page: str, mark: str, folder: Path) -> None:
    blocks = blocks_to_run(ROOT / page, mark)
    on_all_interfaces = any("--connector store" in command for block in blocks for command in block.commands)
    network = own_network() if on_all_interfaces else nullcontext()
    with network, Session(folder, clone=mark == "long") as session:
        for block in blocks:
            session.do(block)


@pytest.mark.parametrize("page", pages_with(""))
def test_commands_run(page, tmp_path):
    run(page, "", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("slow"))
def test_slow_commands_run(page, tmp_path):
    run(page, "slow", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page", [name for name in pages_with("long") if name not in pages_with("live")])
def test_long_commands_run(page, tmp_path):
    run(page, "long", tmp_path)


@pytest.mark.parametrize("page", NAMES)
def test_what_is_not_run_has_a_known_reason(page):
    assert unknown_reasons(ROOT / page) == [], f"reasons are {', '.join(NOT_RUN)}"


@pytest.mark.parametrize("page", NAMES)
def test_no_block_is_overlooked(page):
    """One that is indented or has another fence would neither be run nor parsed."""
    fences = [line for line in (ROOT / page).read_text().splitlines() if line.strip().startswith(("```", "~~~"))]
    assert len(fences) == 2 * len(blocks_of(ROOT / page))


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


def test_an_excuse_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    for reason in (*NOT_RUN, "minutes"):
        page.write_text(f"<!-- not run: {reason} -->\n```console\n$ make test\n```\n")
        assert unknown_reasons(page) == ([] if reason in NOT_RUN else [reason])


def test_what_cannot_be_is_noticed():
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
