"""A submission as it is dropped: a folder with `submission.yaml` and the policy; and what is refused before it is run.

    greedy/
        submission.yaml     name, author, description, policy
        greedy.py           policy: greedy.py:Greedy; or an exported file, policy: greedy.onnx

Nothing here loads the policy: files are looked at as bytes.
"""

from __future__ import annotations

import hashlib
import pickletools
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

METADATA = "submission.yaml"
MOST_METADATA_BYTES = 64 << 10
MOST_BYTES, MOST_FILES = 64 << 20, 100
"""Of a submission's folder, all files together."""
PICKLES = frozenset((".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".dill", ".pkl2", ".bin"))
"""Names of files that are, or hold, pickles."""


class SubmissionError(ValueError):
    """A folder that is no submission; the message says what was expected."""


class Metadata(BaseModel):
    """`submission.yaml`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]
    """Small letters, digits, - and _; what the board calls it, with `submission/` before it."""
    author: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    description: Annotated[str, StringConstraints(min_length=1, max_length=4000)]
    policy: Annotated[
        str, StringConstraints(pattern=r"^([A-Za-z0-9_-]+\.onnx|[A-Za-z0-9_]+\.py:[A-Za-z_][A-Za-z0-9_]*)$")
    ]
    """A file beside this one: FILE.onnx, or MODULE.py:Class."""


EXPECTED = {
    "name": "1 to 40 small letters, digits, - or _",
    "author": "text of 1 to 200 characters",
    "description": "text of 1 to 4000 characters",
    "policy": "FILE.onnx or MODULE.py:Class, of a file in the folder",
}


@dataclass(frozen=True)
class Submission:
    """A submission that may be run, in a sandbox.

    `files`: sha256 (hex) by name, of every file of the folder but the metadata.
    """

    folder: Path
    metadata: Metadata
    files: dict[str, str]

    @property
    def name(self) -> str:
        return f"submission/{self.metadata.name}"


def submission_folders(folder: Path) -> list[Path]:
    """The folders of submissions in `folder`, by name; or `folder` itself where it is one.

    Raises:
        SubmissionError: it is no folder, or has none inside.
    """
    if not folder.is_dir():
        raise SubmissionError(f"{folder}: expected a folder of submissions")
    if (folder / METADATA).is_file():
        return [folder]
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        raise SubmissionError(f"{folder}: has no submissions; expected folders with {METADATA}")
    return found


def read_submission(folder: Path) -> Submission:
    """A submission, checked as far as that goes without running it.

    Raises:
        SubmissionError: naming the file and what was expected.
    """
    if folder.is_symlink():
        raise SubmissionError("is a link; expected a folder")
    files = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    if METADATA not in files:
        raise SubmissionError(f"has no {METADATA}; expected one with {', '.join(EXPECTED)}")
    metadata = _metadata(files.pop(METADATA))
    policy = metadata.policy.partition(":")[0]
    if policy not in files:
        raise SubmissionError(f"{METADATA}: policy: {policy} is not in the folder")
    digests = {}
    for name, path in files.items():
        if path.suffix.lower() in PICKLES or holds_pickle(path):
            raise SubmissionError(f"{printable(name)}: is a pickle, which runs code when it is read; expected .onnx")
        digests[printable(name)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return Submission(folder, metadata, digests)


def _files(folder: Path) -> Iterator[Path]:
    """The regular files of a folder, those in folders inside too, of a size that is allowed."""
    count = size = 0
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        count += 1
        if stat.S_ISDIR(status.st_mode):
            continue
        name = printable(path.relative_to(folder).as_posix())
        if not stat.S_ISREG(status.st_mode):
            raise SubmissionError(f"{name}: is a link or a device; expected files only")
        size += status.st_size
        if count > MOST_FILES or size > MOST_BYTES:
            raise SubmissionError(f"has more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB")
        if path.parent.name != "__pycache__":
            yield path


def _metadata(path: Path) -> Metadata:
    if path.stat().st_size > MOST_METADATA_BYTES:
        raise SubmissionError(f"{METADATA}: has more than {MOST_METADATA_BYTES >> 10} KiB")
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise SubmissionError(f"{METADATA}: cannot be read as YAML: {printable(str(error))}") from None
    if not isinstance(found, dict):
        raise SubmissionError(f"{METADATA}: expected {', '.join(EXPECTED)}, found {type(found).__name__}")
    try:
        return Metadata.model_validate(found)
    except ValidationError as errors:
        # What was found is not repeated: with aliases it may be longer than memory.
        first = errors.errors(include_input=False, include_url=False)[0]
        field = printable(str(first["loc"][0]))
        expected = EXPECTED.get(field, f"no such field, only {', '.join(EXPECTED)}")
        raise SubmissionError(f"{METADATA}: {field}: expected {expected} ({first['msg']})") from None


def holds_pickle(path: Path) -> bool:
    """Whether a file is a pickle by what it contains, or an archive or NumPy file that holds one."""
    data = path.read_bytes()
    if data.startswith(b"\x93NUMPY"):
        return b"'O'" in data[:1024] or b"|O" in data[:1024]
    if zipfile.is_zipfile(path):  # torch.save, numpy.savez
        return True
    calls = False
    try:
        for opcode, _, _ in pickletools.genops(data):  # reads, does not run
            calls |= opcode.name in ("PROTO", "GLOBAL", "STACK_GLOBAL", "INST", "REDUCE", "OBJ", "NEWOBJ")
    except Exception:  # it is none; what it is instead raises all kinds of errors
        return data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05" and calls
    return calls


def printable(text: str, most: int = 300) -> str:
    """Text of others for one line of a table: nothing that moves a cursor or turns the line around."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:most]
