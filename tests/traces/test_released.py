"""`mooncake:NAME`: the released file where it is at hand, else a stand-in that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from traces import TraceError, builtin, load, released, save

SYNTHETIC = released.RELEASED["synthetic"]


@pytest.fixture
def nothing_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder and the checkout, both without traces."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(released, "CHECKOUT", tmp_path / "checkout")
    return tmp_path


def test_a_stand_in_says_so(nothing_at_hand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = load("mooncake:synthetic", seed=3)
    assert trace.name == "builtin:synthetic"
    assert trace.checksum == builtin("synthetic", seed=3).checksum
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == (
        "mooncake:synthetic: stand-in builtin:synthetic, synthesised: the released file is not at hand\n"
    )


@pytest.mark.parametrize("place", ["here/data", "shared/traces", "checkout/data"])
def test_a_file_is_found_where_it_may_be(nothing_at_hand: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    (nothing_at_hand / place).mkdir(parents=True)
    file = nothing_at_hand / place / "mooncake_synthetic_trace.jsonl.gz"
    save(builtin("synthetic", n_requests=SYNTHETIC), file)
    trace = load("mooncake:synthetic")
    assert trace.name == "mooncake:synthetic"
    assert trace.checksum == load(file).checksum
    assert load("mooncake:synthetic", reblock=1024).block_tokens == 1024
    assert capsys.readouterr().err == ""


def test_a_file_of_another_length_is_not_called_released(
    nothing_at_hand: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nothing_at_hand / "here/data").mkdir()
    save(builtin("synthetic", n_requests=1000), nothing_at_hand / "here/data/synthetic_trace.jsonl")
    assert load("mooncake:synthetic").name == "synthetic_trace"
    assert "1,000 requests (the released one has 3,993)" in capsys.readouterr().err


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(TraceError, match=r"no released trace is called 'chat'; expected conversation, synthetic"):
        load("mooncake:chat")
