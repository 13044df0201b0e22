"""A recorded episode as a page: one file that opens from a disk and loads nothing.

`python replay.py` records the episode and calls `write_page`. The file holds the page (index.html, page.css, page.js
beside this one, and what all `pages` have) and the episode, compressed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

from pages import script, style

_HERE = Path(__file__).parent


def write_page(episode: dict[str, Any], path: Path) -> None:
    """Write the page of an episode, as `replay.episode` has it.

    Raises:
        OSError: the file cannot be written.
        ValueError: a number in it is NaN or infinite.
    """
    text = json.dumps(episode, separators=(",", ":"), allow_nan=False)
    data = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    page = (_HERE / "index.html").read_text(encoding="utf-8")
    for name, part in (("style", style(_HERE)), ("script", script(_HERE))):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        page = page.replace(f"{{{name}-hash}}", digest).replace(f"{{{name}}}", part)
    path.write_text(page.replace("{episode}", data), encoding="utf-8")
