"""What the tests of `train.py` and its algorithms share."""

from __future__ import annotations

import pytest

from train import main


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a refusal."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    text = capsys.readouterr().err
    assert stopped.value.code == 2
    assert text.startswith("train.py: error: ")
    assert text.count("\n") == 1, text
    return text
