"""The leaderboard's static site: what it says of a run, and how it looks and works in a real Chromium."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import leaderboard
from benchmarks.leaderboard_site import made_up
from envs.metrics import QUANTILES
from envs.spec import load_cluster
from leaderboard_site import PAGE, write_site
from policies import PolicyError
from policies.describe import describe
from tests import browsing
from tests.conftest import CHROMIUM
from traces import builtin, load, save

SIZES = ((360, 740), (1280, 900), (3840, 2160))
POLICIES = ("conductor", "random", "conductor:threshold=3+predictive:threshold=0.9", "tests.test_leaderboard:Wrapped")
MEASURED = ("decision_us", "decision_alone_us")
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028"


def read(folder: Path) -> dict[str, Any]:
    """The result that the page is given."""
    text = (folder / "result.js").read_text()
    assert text.startswith("const RESULT = ") and text.endswith(";\n")
    found: dict[str, Any] = json.loads(text[len("const RESULT = ") : -2])
    return found


def simulated(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says about the cluster, not about the clock of the machine."""
    return {key: value for key, value in row.items() if key not in MEASURED}


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("traces") / f"{'conversation_' * 6}trace.parquet"  # longer than a telephone is wide
    save(builtin("conversation", n_requests=400), path)
    return str(path)


@pytest.fixture(scope="module")
def command(trace_file: str) -> list[str]:
    policies = ["--policies", ",".join((*POLICIES, "clairvoyant"))]
    cells = ["--trace", trace_file, "--part", "all", "--cluster", "2p2d,1p2d", "--load", "1,4", "--warmup", "20"]
    return [*policies, *cells, "--seeds", "2", "--headroom"]


@pytest.fixture(scope="module")
def site(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small real run, with its JSON beside it."""
    folder = tmp_path_factory.mktemp("real") / "site"
    assert leaderboard.main([*command, "--site", str(folder), "--json", str(folder.parent / "result.json")]) == 0
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 policies in 24 cells."""
    folder = tmp_path_factory.mktemp("large")
    write_site(made_up(30, 24), folder)
    return folder


# --- what is written -------------------------------------------------------------------------------


def test_the_site_has_what_the_run_printed(site: Path) -> None:
    shown = read(site)
    printed = json.loads((site.parent / "result.json").read_text())
    assert len(shown["rows"]) == len(printed["rows"]) == 5 * 4
    for ours, theirs in zip(shown["rows"], printed["rows"], strict=True):
        for key, value in ours.items():
            assert value == theirs[key] or value == pytest.approx(theirs[key], rel=1e-5), key
        assert len(ours["ttft_quantiles_s"]) in (0, QUANTILES)
    for cell in shown["cells"]:
        rows = [row for row in printed["rows"] if row["cell"] == cell["cell"]]
        assert {(row["trace_checksum"], row["cluster"], row["load"]) for row in rows} == {
            (cell["trace_checksum"], cell["cluster"], cell["load"])
        }
        assert cell["bound"] == pytest.approx(rows[0]["bound"], rel=1e-5)


def test_where_the_figures_come_from_is_on_the_site(site: Path, trace_file: str) -> None:
    shown = read(site)
    assert shown["code_version"] == leaderboard.code_version()
    for cell in shown["cells"]:
        assert cell["trace_checksum"] == load(trace_file).checksum
        assert cell["spec_checksum"] == load_cluster(cell["cluster"]).checksum
        assert (cell["seeds"], cell["warmup"]) == ([0, 1], 20)
        slo = load_cluster(cell["cluster"]).slo
        assert (cell["ttft_slo_s"], cell["tbt_slo_s"]) == (slo.ttft_s, slo.tbt_s)


def test_two_runs_give_the_same_figures(command: list[str], site: Path, tmp_path: Path) -> None:
    assert leaderboard.main([*command, "--site", str(tmp_path), "--jobs", "1"]) == 0
    first, second = read(site), read(tmp_path)
    assert [simulated(row) for row in first.pop("rows")] == [simulated(row) for row in second.pop("rows")]
    assert first.pop("command") != second.pop("command")  # another folder
    assert first == second
    for name in PAGE:
        assert (site / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("name", POLICIES)
def test_the_command_of_a_policy_gives_its_rows(name: str, site: Path, capsys: Any) -> None:
    policy = next(policy for policy in read(site)["policies"] if policy["policy"] == name)
    python, script, *given = shlex.split(policy["command"])
    assert (python, script) == ("python", "leaderboard.py")
    capsys.readouterr()
    assert leaderboard.main([*given, "--json", "-"]) == 0
    again = {row["cell"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    printed = json.loads((site.parent / "result.json").read_text())["rows"]
    rows = [row for row in printed if row["policy"] == name]
    assert len(rows) == len(again) == 4
    for row in rows:
        without_bound = {key: value for key, value in simulated(row).items() if not key.startswith("bound")}
        assert simulated(again[row["cell"]]) == without_bound


@pytest.mark.parametrize(
    "given",
    [[], ["--suite", "heldout", "--cells", "*-1x"], ["--trace", "a b.jsonl", "--capacity", "1,1.5"], ["--load", "0.3"]],
)
def test_the_command_asks_for_the_same_cells(given: list[str]) -> None:
    asked = leaderboard.parser().parse_args([*given, "--seeds", "3"])
    command = leaderboard.command_of(leaderboard.Contestant("random"), asked)
    again = leaderboard.parser().parse_args(shlex.split(command)[2:])
    assert again.policies == [["random"]]
    for option in ("suite", "cells", "seeds", "warmup", "reference", "capacity"):
        assert getattr(again, option) == getattr(asked, option)
    if not asked.suite:
        assert again.trace == (asked.trace or [[leaderboard.DEFAULT_TRACE]])
        loads = [list(leaderboard.DEFAULT_LOADS)] if not given else asked.load
        assert again.load == loads


def test_who_does_not_compete_is_marked(site: Path) -> None:
    assert {p["policy"] for p in read(site)["policies"] if not p["competes"]} == {"clairvoyant"}


def test_a_policy_is_described_by_its_options() -> None:
    facts = {fact.name: fact for fact in describe("conductor:threshold=3+predictive:threshold=0.9")}
    assert {name: fact.value for name, fact in facts.items()} == {
        "router": "conductor",
        "router.threshold": "3",
        "router.min_over_both": "0",  # the default
        "admission": "predictive",
        "admission.threshold": "0.9",
    }
    assert all(fact.meaning for fact in facts.values())
    assert {fact.name: fact.value for fact in describe("conductor")}["admission"] == "slo"
    assert describe("tests.test_leaderboard:Wrapped")[0].value == "tests.test_leaderboard:Wrapped"


def test_a_policy_in_files_is_described_by_their_checksums(tmp_path: Path) -> None:
    (learned,) = describe("learned")
    assert re.fullmatch(r"sha256 [0-9a-f]{64}", learned.value)
    copy = tmp_path / "mine.onnx"
    copy.write_bytes((Path(leaderboard.ROOT) / "policies" / "learned.onnx").read_bytes())
    assert describe(str(copy))[0].value == learned.value
    copy.write_bytes(copy.read_bytes() + b"\0")
    assert describe(str(copy))[0].value != learned.value
    with pytest.raises(PolicyError, match=r"config\.yaml"):
        describe(str(tmp_path))


@pytest.mark.parametrize("which", ["site", "large"])
def test_nothing_is_loaded_from_elsewhere_and_nothing_is_inline(which: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(which)
    assert {file.name for file in folder.iterdir()} == {*PAGE, "result.js"}
    for file in folder.iterdir():
        text = file.read_text()
        assert not re.search(r"https?://", text), file.name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|@import", text
        )
    page = (folder / "index.html").read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"\sstyle=|\son\w+=|<style", page)
    assert re.findall(r"<script([^>]*)>(.*?)</script>", page, re.S) == [
        (' src="result.js" defer', ""),
        (' src="page.js" defer', ""),
    ]


def test_thirty_policies_in_24_cells_are_under_5_mb(large: Path) -> None:
    assert len(read(large)["rows"]) == 720
    assert sum(file.stat().st_size for file in large.iterdir()) < 5e6


def test_where_the_site_cannot_be_written_is_one_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("absent/site", "file"):
        given = ["--policies", "random", "--load", "1", "--seeds", "1", "--site", str(tmp_path / folder)]
        assert leaderboard.main(given) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: --site ") and error.count("\n") == 1


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium: apt-get install chromium")
def test_the_benchmark_measures_size_and_load_time() -> None:
    pytest.importorskip("playwright.sync_api", reason="needs playwright")
    command = [sys.executable, "-m", "benchmarks.leaderboard_site", "--runs", "1", "--cells", "2", "--json", "-"]
    done = subprocess.run(command, cwd=leaderboard.ROOT, capture_output=True, text=True, timeout=120, check=True)
    measured = json.loads(done.stdout)
    assert (measured["policies"], measured["cells"]) == (30, 2)
    assert measured["bytes"] > 1e4 and 0 < measured["load_ms"] <= measured["slowest_load_ms"]


# --- in a browser ----------------------------------------------------------------------------------


async def opened(browser: Any, folder: Path, said: list[str], fragment: str = "", **options: Any) -> Any:
    """The page, opened from the disk."""
    address = (folder / "index.html").as_uri() + fragment
    return await browsing.opened(browser, address, said, "#ranking tbody tr", **options)


async def goodputs(page: Any) -> dict[str, tuple[float, float, float]]:
    """Policy -> mean and interval, as the ranking shows them."""
    found = {}
    for line in await page.locator("#ranking tbody tr").all():
        name = await line.locator("th a").inner_text()
        low, high = (await line.locator("td").nth(3).inner_text()).split("\u2013")
        found[name] = (float(await line.locator("td").nth(2).inner_text()), float(low), float(high))
    return found


def averaged(result: dict[str, Any], policy: str, cells: list[str]) -> tuple[float, float, float]:
    """The same, counted here: errors within a trace are averaged, of several traces added as squares."""
    rows = [row for row in result["rows"] if row["policy"] == policy and row["cell"] in cells]
    trace = {cell["cell"]: cell["trace_checksum"] for cell in result["cells"]}
    mean = sum(row["goodput"] for row in rows) / len(rows)
    sides = []
    for side in ("goodput_low", "goodput_high"):
        errors = dict.fromkeys(trace.values(), 0.0)
        for row in rows:
            errors[trace[row["cell"]]] += abs(row[side] - row["goodput"]) / len(rows)
        sides.append(math.hypot(*errors.values()))
    return mean, max(0.0, mean - sides[0]), min(1.0, mean + sides[1])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}px")
async def test_it_draws_a_real_run(site: Path, browser: Any, size: tuple[int, int], scheme: str) -> None:
    said: list[str] = []
    viewport = {"width": size[0], "height": size[1]}
    fragment = f"#policy={POLICIES[2].replace('+', '%2B')}"
    page = await opened(browser, site, said, fragment, viewport=viewport, color_scheme=scheme)
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the screen"
    labels = [await svg.get_attribute("aria-label") for svg in await page.locator("svg[role=img]").all()]
    assert (
        len(labels) == 5 + 2 + 4 + 2
    )  # a whisker for each policy; curves of two clusters; a cell's charts; a policy's
    assert [label for label in labels if not re.search(r"\d", label or "")] == []
    for figure in ("cell-ttft", "cell-tbt"):
        lines = await page.locator(f"#{figure} svg[role=img] .line").evaluate_all(
            "all => all.map(p => p.getAttribute('d'))"
        )
        assert len(lines) == 5
        assert all(line.count("L") == QUANTILES - 1 and "NaN" not in line for line in lines)
    curves = await page.locator("#curves svg[role=img] .line").evaluate_all("all => all.map(p => p.getAttribute('d'))")
    assert len(curves) == 2 * 5 and all(line.count("L") == 1 and "NaN" not in line for line in curves)
    for figure in ("cell-lost", "cell-hits", "policy-lost", "policy-hits"):
        assert await page.locator(f"#{figure} rect[x]").count() > 0
    assert await browsing.is_light(page) is (scheme == "light")
    text = await page.locator("#policy").inner_text()
    assert "python leaderboard.py --policies 'conductor" in text or "python leaderboard.py --policies conductor" in text
    assert "router.threshold" in text
    checksum = read(site)["cells"][0]["trace_checksum"]
    assert checksum in await page.locator("#inputs").inner_text()
    assert "no scheduler" in await page.locator("#ranking").inner_text()
    assert said == []
    await page.context.close()


async def test_filters_average_what_they_show_by_mouse_and_by_keyboard(large: Path, browser: Any) -> None:
    said: list[str] = []
    page = await opened(browser, large, said)
    result = read(large)

    async def same(cells: list[str]) -> None:
        assert f"{len(cells)} of 24 cells" in await page.locator("#shown").inner_text()
        assert await page.locator("#cells tbody tr").count() == len(cells)
        shown = await goodputs(page)
        assert len(shown) == 30
        for policy, figures in shown.items():
            assert figures == pytest.approx(averaged(result, policy, cells), abs=6e-4)
        means = [mean for mean, _, _ in shown.values()]
        assert means == sorted(means, reverse=True)

    cells = result["cells"]
    await same([cell["cell"] for cell in cells])
    await page.locator("#by-trace input").nth(0).click()
    rest = [cell for cell in cells if cell["trace"] != "conversation"]
    await same([cell["cell"] for cell in rest])
    assert await page.locator("#curves figure").count() == 4
    assert rest[0]["cell"] in await page.locator("#cell-title").inner_text()  # what is not shown is not told of
    await page.locator("#by-cluster input").nth(0).focus()
    await page.keyboard.press("Space")
    rest = [cell for cell in rest if cell["cluster"] != "8p8d"]
    await same([cell["cell"] for cell in rest])
    await page.keyboard.press("Tab")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Space")
    rest = [cell for cell in rest if cell["times_capacity"] != 0.8]
    await same([cell["cell"] for cell in rest])
    for box in await page.locator("#by-load input").all():
        await box.uncheck()
    assert "No cell is shown" in await page.locator("#ranking").inner_text()
    assert await page.locator("#curves figure").count() == 0
    await page.locator("#all").focus()
    await page.keyboard.press("Enter")
    await same([cell["cell"] for cell in cells])
    assert said == []


async def column(page: Any, heading: str, after: str = "") -> dict[str, str]:
    """Policy -> what the ranking has under a heading, of several the one that comes after another heading."""
    headings = await page.locator("#ranking thead th").all_inner_texts()
    at = headings.index(heading, headings.index(after) if after else 0)
    lines = await page.locator("#ranking tbody tr").all()
    return {
        await line.locator("th a").inner_text(): await line.locator("th, td").nth(at).inner_text() for line in lines
    }


async def test_the_ranking_tells_of_high_load_and_headroom(site: Path, large: Path, browser: Any) -> None:
    said: list[str] = []
    page = await opened(browser, large, said)
    result = read(large)
    high = [cell["cell"] for cell in result["cells"] if cell["times_capacity"] >= 1]
    assert len(high) == 18
    past, interval = "at or past capacity", "95 % interval"
    means, intervals = await column(page, past), await column(page, interval, past)
    for policy in (policy["policy"] for policy in result["policies"]):
        mean, low, high_end = averaged(result, policy, high)
        assert float(means[policy]) == pytest.approx(mean, abs=1e-4)
        shown = [float(end) for end in intervals[policy].split("\u2013")]
        assert shown == pytest.approx([low, high_end], abs=6e-4)
    page = await opened(browser, site, said)
    result = read(site)
    cells = [cell["cell"] for cell in result["cells"]]
    bound = sum(cell["bound"] for cell in result["cells"]) / len(cells)
    best = averaged(result, "clairvoyant", cells)[0]
    headroom, future = await column(page, "headroom to the bound"), await column(page, "to the clairvoyant")
    for policy in POLICIES:
        mean = averaged(result, policy, cells)[0]
        assert float(headroom[policy]) == pytest.approx(bound - mean, abs=1e-4)
        assert float(future[policy].replace("\u2212", "-")) == pytest.approx(best - mean, abs=1e-4)
    assert said == []


async def test_policies_and_cells_have_addresses(large: Path, browser: Any) -> None:
    said: list[str] = []
    page = await opened(browser, large, said)
    assert await page.locator("#policy").is_hidden()
    name = await page.locator("#ranking tbody th a").nth(2).inner_text()
    await page.locator("#ranking tbody th a").nth(2).focus()
    await page.keyboard.press("Enter")
    await page.wait_for_selector("#policy:not([hidden])")
    assert await page.locator("#policy-title").inner_text() == f"Policy {name}"
    assert await page.locator("#policy-rows tbody tr").count() == 24
    assert await page.evaluate("document.activeElement.id") == "policy-title"
    address = page.url
    await page.locator("#policy-rows tbody th a").nth(9).click()
    await page.wait_for_function("document.activeElement.id === 'cell-title'")
    assert read(large)["cells"][9]["cell"] not in address
    assert await page.locator("#cell-rows tbody tr").count() == 30
    await page.go_back()
    await page.wait_for_selector("#policy:not([hidden])")
    await page.goto(f"{(large / 'index.html').as_uri()}#policy=nobody")
    await page.wait_for_function("document.getElementById('policy-note').textContent.includes('No policy of this run')")
    assert said == []


async def test_the_charts_draw_who_is_chosen(large: Path, browser: Any) -> None:
    said: list[str] = []
    page = await opened(browser, large, said)
    lines = page.locator("#cell-ttft svg[role=img] .line")
    assert await lines.count() == 6
    await page.locator("#ranking input:not(:checked)").first.check()
    assert await lines.count() == 7
    await page.locator("#ranking input:checked").first.focus()
    await page.keyboard.press("Space")
    assert await lines.count() == 6
    assert await page.evaluate("document.activeElement.type") == "checkbox"  # the table was not drawn again
    while await page.locator("#ranking input:checked").count():
        await page.locator("#ranking input:checked").first.uncheck()
    assert await lines.count() == 0
    assert "no policy is chosen" in await page.locator("#cell-ttft").inner_text()
    assert said == []


class Strict(SimpleHTTPRequestHandler):
    """A web server that allows a page its own files and nothing inline."""

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", "default-src 'self'; img-src data:; object-src 'none'")
        super().end_headers()

    def log_message(self, *_: Any) -> None: ...


async def test_a_strict_web_server_may_serve_it(large: Path, browser: Any) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Strict, directory=str(large)))
    Thread(target=server.serve_forever, daemon=True).start()
    said: list[str] = []
    page = await browser.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    await page.goto(f"http://127.0.0.1:{server.server_port}/")
    await page.wait_for_selector("#ranking tbody tr")
    assert await page.locator("#cell-lost rect[x]").count() > 0
    assert await page.evaluate("getComputedStyle(document.querySelector('.columns')).display") == "grid"
    assert said == []
    server.shutdown()
    server.server_close()


async def test_names_are_text_and_what_is_missing_is_a_dash(tmp_path: Path, browser: Any) -> None:
    result = made_up(2, 1)
    name = result["policies"][0]["policy"]
    result = json.loads(json.dumps(result).replace(json.dumps(name)[1:-1], json.dumps(HOSTILE)[1:-1]))
    for row in result["rows"]:
        row |= {"ttft_p90_s": None, "hit_rate": None, "hit_rate_device": None, "ttft_quantiles_s": []}
    result["cells"][0] |= {"winner": None, "paired": None}
    result["paired"] = result["paired_saturated"] = None
    result["capacities"] = [{"setting": "x" * 200, "load": 1.5, "meaning": "made up"}]
    result["disqualified"] = [{"policy": "submission/" + "y" * 40, "reason": f"KeyError: {HOSTILE} {'z' * 200}"}]
    write_site(result, tmp_path)
    said: list[str] = []
    page = await opened(browser, tmp_path, said, viewport={"width": 360, "height": 740})
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the screen"
    names = await page.locator("#ranking tbody th a").all_text_contents()
    assert HOSTILE in names
    assert HOSTILE in (await page.locator("#disqualified tbody").text_content())
    assert await page.locator("img").count() == 0
    await page.locator("#ranking tbody th a").nth(names.index(HOSTILE)).click()
    await page.wait_for_selector("#policy:not([hidden])")
    assert await page.locator("#policy-title").text_content() == f"Policy {HOSTILE}"
    assert "\u2013" in await page.locator("#cell-rows").inner_text()
    assert "nothing to draw" in await page.locator("#cell-ttft").inner_text()
    assert said == []
