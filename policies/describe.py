"""What a policy's name stands for, for who wants the same figures again: its parts, its options, its files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from .policy import PolicyError
from .registry import ADMISSIONS, CLAIRVOYANT, LEARNED, ROUTERS, Part, parse_heuristic
from .run_folder import last_checkpoint, read_config


class Fact(NamedTuple):
    """One thing that a policy's decisions depend on."""

    name: str
    value: str
    meaning: str


def describe(name: str) -> list[Fact]:
    """Everything that makes a policy, given by a name that `make_policy` takes; files with their SHA-256.

    Raises:
        PolicyError: a run folder without a configuration or weights; an option that is no option=number.
    """
    heuristic = parse_heuristic(name)
    if heuristic is not None:
        router, admission, of_router, of_admission = heuristic
        return [
            *_part("router", router, ROUTERS[router], of_router),
            *_part("admission", admission, ADMISSIONS[admission], of_admission),
        ]
    path = Path(name)
    if name == "learned":
        return [_file(LEARNED, "shipped with the project; docs/learning.md has how it was found")]
    if name == "clairvoyant":
        return [Fact("knows", "the future", f"tries decisions out, assuming {CLAIRVOYANT[0]} to go on: no scheduler")]
    if path.is_dir():
        config = read_config(path)
        if config.get("network") is None:
            return [_file(path / "config.yaml", "run folder of train.py"), *describe(config["policy"])]
        weights = path / "best.zip"
        found: Path | None = weights if weights.is_file() else last_checkpoint(path)
        if found is None:
            raise PolicyError(f"{path} has neither best.zip nor a checkpoint")
        return [_file(path / "config.yaml", "run folder of train.py"), _file(found, "weights")]
    if path.is_file():
        return [_file(path, "exported policy")]
    return [Fact("class", name, "code of the reader's own, imported where the command runs")]


def _part(kind: str, name: str, part: Part, given: dict[str, float]) -> list[Fact]:
    options = [Fact(f"{kind}.{o.name}", f"{given.get(o.name, o.default):.6g}", o.meaning) for o in part.options]
    return [Fact(kind, name, part.meaning), *options]


def _file(path: Path, meaning: str) -> Fact:
    return Fact(path.name, f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}", meaning)
