"""What the pages have in common: one palette, and the ways to draw. A page of its own has `page.css` and `page.js`
beside its `index.html`, and is given the files of this folder before them.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def style(folder: Path) -> str:
    """The style sheet of the page whose files are in a folder."""
    return (_HERE / "common.css").read_text(encoding="utf-8") + (folder / "page.css").read_text(encoding="utf-8")


def script(folder: Path) -> str:
    """Its script."""
    return (_HERE / "common.js").read_text(encoding="utf-8") + (folder / "page.js").read_text(encoding="utf-8")
