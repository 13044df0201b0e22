"""`python -m runtime.proto`: make the modules of this folder from conductor.proto."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "runtime/proto"


def generate(target: Path) -> int:
    """Write the modules under `target`; returns protoc's exit status."""
    options = [f"-I{FOLDER}={ROOT / FOLDER}", f"--python_out={target}", f"--pyi_out={target}"]
    return int(protoc.main(["protoc", *options, f"--grpc_python_out={target}", f"{FOLDER}/conductor.proto"]))


if __name__ == "__main__":
    sys.exit(generate(ROOT))
