"""The live page: what it says, and how it looks and works in a real Chromium."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from runtime.client import Client
from runtime.live_page import KEPT, LivePage, is_loopback
from runtime.sidecar import ConfigError, Options, Sidecar
from tests.browsing import opened
from tests.runtime.conftest import Process

SIZES = ((360, 740), (1280, 900), (3840, 2160))


def cluster_file(folder: Path, per_pool: int) -> str:
    path = folder / "cluster.yaml"
    nodes = [{"count": per_pool, "hardware": "h100x8-llama3-70b"}]
    path.write_text(yaml.safe_dump({"name": "shown", "block_tokens": 16, "prefill": nodes, "decode": nodes}))
    return str(path)


def get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return json.loads(answer.read())


async def work(port: int, count: int = 12, seed: int = 0) -> list[str]:
    """Requests that are decided, some rejected, the others finished; their ids."""
    rng = np.random.default_rng(seed)
    names = []
    async with Client(f"127.0.0.1:{port}") as client:
        for i in range(count):
            name = f"<b>{seed}-{i}</b>"
            impossible = {"ttft_slo_s": 1e-9} if i % 4 == 3 else {}
            placed = await client.schedule(
                tokens=rng.integers(0, 99, 640, dtype=np.uint32), request_id=name, **impossible
            )
            names.append(name)
            if not placed.rejected:
                async with placed:
                    placed.prefill_done()
                    placed.first_token()
                    placed.finished(output_tokens=8, tbt_s=0.01 * (i + 1))
    return names


@pytest.fixture(scope="module", params=[1, 250], ids=["2 workers", "500 workers"])
def sidecar(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = cluster_file(tmp_path_factory.mktemp("live"), request.param)
    started = Process(
        [
            "--cluster",
            file,
            "--live",
            "127.0.0.1:0",
            "--shadow",
            "random",
            "--policy",
            "conductor+slo",
            "--in-flight",
            "64",
        ]
    )
    started.names = asyncio.run(work(started.ports["grpc"]))  # type: ignore[attr-defined]
    while get(started.ports["live"], "/live/state")["in_flight"]:  # reports are not waited for
        time.sleep(0.05)
    yield started
    started.stop()


def test_the_state_is_what_was_decided_and_what_came_of_it(sidecar: Any) -> None:
    state = get(sidecar.ports["live"], "/live/state?after=0")
    assert state["policy"] == "conductor+slo"
    assert state["shadow"] == "random"
    assert [row["id"] for row in state["decisions"]] == sidecar.names
    assert state["assigned"] == 9
    assert state["rejected"] == {"rejected-saturated": 3}
    assert len(state["outcomes"]) == 9
    assert state["shadow_asked"] == 12
    assert [w["role"] for w in state["workers"]].count("prefill") * 2 == len(state["workers"])
    assert state["in_flight"] == 0
    later = get(sidecar.ports["live"], f"/live/state?after={state['number']}")
    assert later["decisions"] == later["outcomes"] == []
    assert later["assigned"] == 9


def test_a_decision_is_explained(sidecar: Any) -> None:
    why = get(sidecar.ports["live"], "/live/why?id=%3Cb%3E0-0%3C%2Fb%3E")
    assert why["verdict"].startswith("prefill on prefill-")
    assert sum(row["chosen"] for row in why["prefills"]) == sum(row["chosen"] for row in why["decodes"]) == 1


@pytest.mark.parametrize(
    ("path", "status"), [("/live/why?id=none", 404), ("/live/state?after=x", 400), ("/live/etc", 404)]
)
def test_what_is_not_there_is_said(sidecar: Any, path: str, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(sidecar.ports["live"], path)
    assert error.value.code == status


def test_the_page_is_read_only(sidecar: Any) -> None:
    url = f"http://127.0.0.1:{sidecar.ports['live']}/live/state"
    for method in ("POST", "PUT", "DELETE"):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(urllib.request.Request(url, b"{}", method=method), timeout=30)
        assert error.value.code == 405


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}px")
async def test_it_draws_and_explains_in_a_browser(
    sidecar: Any, browser: Any, size: tuple[int, int], scheme: str
) -> None:
    said: list[str] = []
    here = f"http://127.0.0.1:{sidecar.ports['live']}/live"
    window = {"width": size[0], "height": size[1]}
    page = await opened(browser, here, said, "#decisions tr", (here, "data:"), viewport=window, color_scheme=scheme)
    state = get(sidecar.ports["live"], "/live/state")
    assert await page.locator(".tile").count() == len(state["workers"])
    assert await page.locator("#decisions tr").count() == len(state["decisions"])
    for figure in ("ttft", "tbt", "predicted", "rejected", "cache"):
        label = await page.locator(f"#{figure} svg").get_attribute("aria-label")
        assert label, f"{figure} is not drawn, or says nothing to who cannot see it"
    assert await page.locator("#ttft circle").count() == len(state["outcomes"])
    assert "<b>0-0</b>" in await page.locator("#decisions").inner_text()  # as text, not as HTML
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "the page is wider than the screen"
    )
    # by keyboard alone: to the first worker, then to the first decision's explanation
    await page.locator(".tile").first.focus()
    await page.keyboard.press("Enter")
    assert "load" in await page.locator("#worker").inner_text()
    await page.locator("#decisions button").last.focus()
    await page.keyboard.press("Enter")
    await page.wait_for_selector("#why table")
    assert "prefill on prefill-" in await page.locator("#why").inner_text()
    for button in await page.locator("button").all():
        if not await button.get_attribute("aria-label"):
            raise AssertionError(f"a button without a name: {await button.inner_html()}")
    assert said == []
    await page.context.close()


async def test_it_follows_what_happens_and_says_when_nobody_answers(sidecar: Any, browser: Any) -> None:
    page = await browser.new_page()
    await page.goto(f"http://127.0.0.1:{sidecar.ports['live']}/live")
    await page.wait_for_selector("#decisions tr")
    before = await page.locator("#decisions tr").count()
    await work(sidecar.ports["grpc"], 4, seed=7)
    await page.wait_for_selector(f"#decisions tr:nth-child({before + 4})")
    await page.route("**/live/state*", lambda route: route.abort())
    await page.wait_for_selector("#trouble:not([hidden])")
    assert "does not answer" in await page.locator("#trouble").inner_text()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_other_machines_see_it_only_where_that_is_wanted() -> None:
    with pytest.raises(ConfigError, match="--live-outside"):
        Sidecar(Options(cluster="2p2d", live="0.0.0.0:0"))


def test_what_is_kept_is_bounded() -> None:
    from runtime.conductor import Conductor
    from runtime.request import Request
    from runtime.workers import load_live_cluster

    conductor = Conductor(load_live_cluster("2p2d"))
    page = LivePage(conductor, list)
    for i in range(KEPT + 10):
        conductor.schedule(Request(str(i), input_tokens=100))
        conductor.finished(str(i), output_tokens=2, ttft_s=0.1, tbt_s=float("nan"))
    state = page.state(0)
    assert len(state["decisions"]) == len(state["outcomes"]) == KEPT
    assert state["decisions"][-1]["id"] == str(KEPT + 9)
    assert state["outcomes"][-1]["tbt_s"] is None
