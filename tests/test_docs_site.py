"""The site of the documentation is built without a warning and loads nothing from elsewhere; its notebook runs."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs/first_hour.ipynb"
ELSEWHERE = re.compile(r"<(script|img|iframe)[^>]+src=.?(https?:)?//|<link[^>]+rel=.?(stylesheet|preconnect)[^>]+//")
"""What a browser would fetch from another host."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site's folder; its notebook is not run."""
    pytest.importorskip("mkdocs_jupyter", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


def test_site_has_every_page(site):
    pages = {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}
    written = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in (ROOT / "docs").rglob("*.md")}
    assert written | {"first_hour.html"} <= set(pages)
    assert [name for name, text in pages.items() if ELSEWHERE.search(text)] == []
    for name in ("ClusterEnv", "ClusterVectorEnv", "ClusterSpec", "Observation"):
        assert f"{name}</" in pages["api/envs.html"] or f">{name}<" in pages["api/envs.html"], name


async def test_search_and_pages_ask_nobody_else(site, browser):
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}/"
        page = await browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        for name in ("first_hour", "api/envs", "index"):
            await page.goto(f"{here}{name}.html")
        await page.keyboard.press("/")
        await page.keyboard.type("early rejection")
        await page.wait_for_selector(".md-search-result__item", timeout=20_000)
        server.shutdown()
    assert asked and [url for url in asked if not url.startswith((here, "data:", "blob:"))] == []


def test_notebook_has_no_outputs():
    nbformat = pytest.importorskip("nbformat", reason="needs the extra docs")
    notebook = nbformat.read(NOTEBOOK, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.slow
def test_notebook_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs the extra docs")
    pytest.importorskip("ipykernel", reason="needs the extra docs")
    pytest.importorskip("sb3_contrib", reason="needs the extra train")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, 4)
    ran = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in ran.cells for output in cell.get("outputs", ())]
    said = "".join(output.get("text", "") for output in outputs)
    assert "mine:ShortestTtft" in said and "runs/mine" in said
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
