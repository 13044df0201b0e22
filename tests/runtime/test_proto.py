"""The protocol's modules are those of conductor.proto."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.proto.__main__ import FOLDER, ROOT, generate

VERSION = re.compile(r"\d+\.\d+\.\d+|^ +\d+,$", re.MULTILINE)  # of grpcio-tools, which is in the modules


def test_modules_are_up_to_date(tmp_path: Path):
    assert generate(tmp_path) == 0
    made = {path.name: path.read_text() for path in (tmp_path / FOLDER).iterdir()}
    assert set(made) == {"conductor_pb2.py", "conductor_pb2.pyi", "conductor_pb2_grpc.py"}
    for name, text in made.items():
        kept = (ROOT / FOLDER / name).read_text()
        assert VERSION.sub("", text) == VERSION.sub("", kept), f"{name}: run python -m runtime.proto"
