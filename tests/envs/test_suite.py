"""Suites: the built-in one, files, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.spec import SpecError, load_cluster
from envs.suite import load_suite, suite_names

GOOD = """
warmup: 10
settings:
  - {name: one, trace: "builtin:conversation", part: test, cluster: 2p2d, capacity: [0.8, 1.5]}
  - {name: two, trace: "builtin:hotspot", part: all, cluster: 8p8d, capacity: [1]}
"""


def test_a_file_is_a_suite(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    suite = load_suite(file)
    assert (suite.name, suite.warmup) == ("mine", 10)
    assert [(cell.name, cell.share) for cell in suite.cells] == [("one-0.8x", 0.8), ("one-1.5x", 1.5), ("two-1x", 1)]
    assert suite.cells[1].setting is suite.settings[0]


def test_heldout_is_what_nothing_is_trained_on() -> None:
    suite = load_suite("heldout")
    assert suite_names() == ["heldout"]
    assert len(suite.cells) == 25
    assert suite.warmup == 1000
    assert sum(cell.share >= 1 for cell in suite.cells) == 22
    for setting in suite.settings:
        if setting.trace in ("mooncake:conversation", "mooncake:synthetic"):
            assert setting.part == "test"
        load_cluster(setting.cluster)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("part: test", "part: last"), r"settings\.0\.part: .*'train', 'validation', 'test' or 'all', found 'last'"),
        (("[0.8, 1.5]", "[0.8, 0]"), r"settings\.0\.capacity\.1: .*greater than 0, found 0"),
        (("[0.8, 1.5]", "[]"), r"settings\.0\.capacity: .*at least 1 item"),
        (("[0.8, 1.5]", "[1.5, 1.5]"), r"two cells are called 'one-1\.5x'"),
        (("name: two", "name: two words"), r"settings\.1\.name: .*'two words'"),
        (("warmup", "warm_up"), r"warm_up: no such field"),
        (("cluster: 2p2d, ", ""), r"settings\.0\.cluster: Field required"),
        (("settings", "- settings"), "expected a mapping with settings|not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD.replace(*change))
    with pytest.raises(SpecError, match=message) as error:
        load_suite(file)
    assert str(file) in str(error.value)


def test_an_unknown_suite_is_told_the_known_ones() -> None:
    with pytest.raises(SpecError, match="no suite is called 'mine' .* built in are heldout"):
        load_suite("mine")
