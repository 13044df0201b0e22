"""The compile cache: survives another process and directory, and never serves code that is not the present source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
from .compile import compiled
from .latency import reuse_tokens


@compiled
def probe(blocks):
    return reuse_tokens(blocks, 512, 100_000)
"""
SHOW = """
from envs.kernel import probe
value = probe.probe(3)
print(value, sum(probe.probe.stats.cache_hits.values()))
"""


def run(checkout: Path, cache: Path, directory: Path) -> tuple[int, int]:
    """What the probe returns, and whether it came from the cache."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, cwd=directory, capture_output=True, text=True, check=True
    )
    value, hits = done.stdout.split()
    return int(value), int(hits)


def test_an_edited_helper_in_another_file_is_noticed(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for package in ("envs", "traces"):
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "envs" / "kernel" / "probe.py").write_text(PROBE)
    cache = tmp_path / "cache"
    assert run(checkout, cache, tmp_path) == (3 * 512, 0)
    assert run(checkout, cache, checkout) == (3 * 512, 1)  # another process, another working directory
    latency = checkout / "envs" / "kernel" / "latency.py"
    before = "return min(blocks * block_tokens, input_tokens - 1)"
    text = latency.read_text()
    assert before in text
    stat = latency.stat()
    latency.write_text(text.replace(before, "return min(blocks * block_tokens, input_tokens - 2) + 7"))
    os.utime(latency, (stat.st_atime, stat.st_mtime))  # not even the time of the file gives it away
    assert run(checkout, cache, tmp_path) == (3 * 512 + 7, 0)


def test_an_unwritable_cache_directory_falls_back(tmp_path: Path) -> None:
    file = tmp_path / "not a directory"
    file.write_text("")
    code = "from envs.kernel.compile import cache_directory; print(cache_directory('envs'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NUMBA_CACHE_DIR": str(file)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).is_dir()


def test_bounds_are_checked_on_request() -> None:
    code = (
        "import numpy as np\n"
        "from envs.kernel import memory\n"
        "from envs.kernel.compile import compiled\n"
        "import numba\n"
        "try:\n"
        "    memory.check(3, 3)\n"
        "except IndexError as error:\n"
        "    print('refused:', error)\n"
    )
    for flag, expected in (("1", "refused: a kernel reached outside its table"), ("0", "")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"CONDUCTOR_CHECK_BOUNDS": flag},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected
