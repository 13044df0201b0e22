"""`python -m policies`: what it prints, and that every mistake is one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from policies import ADMISSIONS, ROUTERS, PolicyError, artifact
from policies.__main__ import main
from tests.policies.test_artifact import ROOT, exported, trained


def outcome(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    shown = capsys.readouterr()
    return int(stopped.value.code or 0), shown.out, shown.err


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a refusal."""
    code, out, err = outcome(arguments, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused must be refused before the export, which takes long."""

    def never(*_: object) -> bytes:
        raise AssertionError("exported")

    monkeypatch.setattr(artifact, "to_onnx", never)


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(["list"], capsys)
    assert code == 0
    for parts in (ROUTERS, ADMISSIONS):
        for name, part in parts.items():
            assert f"  {name}" in out and part.meaning in out
            assert all(f":{option.name}={option.default:g}  {option.meaning}" in out for option in part.options)


def test_help_teaches_and_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('torch', 'onnx', 'onnxruntime'):\n    sys.modules[name] = None\n"
    )
    for arguments in (["--help"], ["list", "-h"], ["export", "-h"], ["show", "-h"], ["tune", "-h"], ["list"]):
        shown = subprocess.run(
            [sys.executable, "-m", "policies", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        assert arguments == ["list"] or "Example" in shown.stdout


def test_export_show_and_replace(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, file = trained(tmp_path_factory), exported(tmp_path_factory)
    whole = file.read_bytes()
    monkeypatch.setattr(artifact, "to_onnx", lambda scorer, about: whole)  # exported once already
    out = tmp_path / "mine.onnx"
    code, shown, _ = outcome(["export", str(run), "--out", str(out)], capsys)
    assert code == 0
    assert out.read_bytes() == whole
    assert f"{out}: " in shown and "best.zip" in shown and "validation goodput 0." in shown and "40x7" in shown

    assert "exists; --force replaces it" in error_of(["export", str(run), "--out", str(out)], capsys)
    out.write_bytes(b"mine")
    assert outcome(["export", str(run), "--out", str(out), "--force", "--checkpoint", "final"], capsys)[0] == 0
    assert out.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["mine.onnx"]

    code, shown, _ = outcome(["show", str(out)], capsys)
    assert code == 0
    said = yaml.safe_load(shown)
    code, shown, _ = outcome(["show", str(out), "--json"], capsys)
    assert json.loads(shown) == said == artifact.read_metadata(out)


def test_checkpoints_by_name(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path / "copy"
    shutil.copytree(trained(tmp_path_factory), run)
    config = yaml.safe_load((run / "config.yaml").read_text())

    def training(name: str) -> dict[str, object]:
        return artifact._metadata(run, artifact._checkpoint(run, name), config)["training"]  # type: ignore[no-any-return]

    assert training("final")["steps"] == 256
    first = training("steps_000000000000.zip")
    assert first["checkpoint"] == "steps_000000000000.zip"
    assert first["steps"] == 0
    assert first["validation"]["steps"] == 0  # type: ignore[index]
    assert training(str(run / "checkpoints" / "steps_000000000128.zip"))["steps"] == 128
    (run / "metrics.json").unlink()
    assert training("best")["steps"] is None
    (run / "best.zip").unlink()
    assert training("best")["checkpoint"] == "final.zip"


@pytest.mark.usefixtures("no_export")
def test_refusals_of_export(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(trained(tmp_path_factory)), str(tmp_path / "a.onnx")
    assert "nope: no such run folder" in error_of(["export", "nope", "--out", out], capsys)
    assert "has no config.yaml" in error_of(["export", str(tmp_path), "--out", out], capsys)
    missing = str(tmp_path / "no" / "a.onnx")
    assert "expected a file in a folder that exists" in error_of(["export", run, "--out", missing], capsys)
    assert "is a folder" in error_of(["export", run, "--out", str(tmp_path)], capsys)
    assert "ends in .onnx" in error_of(["export", run, "--out", str(tmp_path / "a.zip")], capsys)
    error = error_of(["export", run, "--out", out, "--checkpoint", "steps_7.zip"], capsys)
    assert "no checkpoint 'steps_7.zip'; there are best.zip, final.zip, steps_000000000000.zip" in error
    broken = tmp_path / "broken.zip"
    broken.write_bytes(b"PK")
    error = error_of(["export", run, "--out", out, "--checkpoint", str(broken)], capsys)
    assert "broken.zip: expected weights of set-scorer/2" in error
    assert not Path(out).exists()
    assert outcome(["export", run], capsys)[0] == 2
    assert outcome([], capsys)[0] == 2


def test_a_disagreement_writes_nothing(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, whole = str(trained(tmp_path_factory)), exported(tmp_path_factory).read_bytes()
    monkeypatch.setattr(artifact, "to_onnx", lambda scorer, about: whole)

    def disagree(*_: object) -> None:
        raise PolicyError("run: ONNX Runtime and torch disagree")

    monkeypatch.setattr(artifact, "check_same", disagree)
    assert "disagree" in error_of(["export", run, "--out", str(tmp_path / "a.onnx")], capsys)
    assert not list(tmp_path.iterdir())


def test_refusals_of_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nope.onnx: no such file" in error_of(["show", "nope.onnx"], capsys)
    file = tmp_path / "a.onnx"
    file.write_text("hello")
    assert "not an ONNX file" in error_of(["show", str(file)], capsys)
