"""The replay of an episode: that it is the leaderboard's own, what its page says, and how that works in Chromium."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import leaderboard
import replay
from envs.state import Source, Status
from leaderboard import Cell, Contestant, make_part, make_setting
from replay_page import write_page
from tests import browsing
from traces import builtin

SIZES = ((360, 740), (1400, 900), (3840, 2160))
TWO = ("conductor+predictive", "random+early")
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028{script}"


def read(file: Path) -> dict[str, Any]:
    """The episode that a page is given."""
    data = re.search(r'id="episode">([^<]*)<', file.read_text())
    assert data is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(data[1])))
    return found


def cell_of(cluster: str = "2p2d", requests: int = 300, load: float = 1.0, warmup: int = 0, seeds: int = 2) -> Cell:
    trace = builtin("conversation", n_requests=requests)
    return Cell(make_setting(trace, make_part(trace, "all", warmup, seeds, "it"), cluster), load)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies on an overloaded cluster, after some requests that are not shown."""
    path = tmp_path_factory.mktemp("replay") / "page.html"
    given = ["--cluster", "2p3d", "--load", "1", "--warmup", "50", "--skip", "20", "--requests", "400", "--part", "all"]
    assert replay.main(["--policies", ",".join(TWO), *given, "--out", str(path)]) == 0
    return path


# --- what is recorded ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("conductor+predictive", 300),
        ("random", 300),
        ("learned", 300),
        ("tests.test_leaderboard:Wrapped", 100),
        ("clairvoyant", 30),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_the_leaderboards_own_replay_to_the_bit(name: str, requests: int, seed: int) -> None:
    cell = cell_of(requests=requests, load=1.5, warmup=10)
    recorded = replay.record(Contestant(name), cell, seed, requests)
    (own,) = Contestant(name).replays(cell.setting, [(cell.load, seed)])
    assert len(own.outcomes) == requests - 10
    for field in own.outcomes.dtype.names or ():
        assert recorded.outcomes[field][10:].tobytes() == own.outcomes[field].tobytes(), field
    assert Counter(recorded.outcomes["status"].tolist())[Status.OPEN] == 0


def test_what_was_known_is_of_the_decision_that_was_taken() -> None:
    cell = cell_of("4p2d", 400, 1.5)
    recorded = replay.record(Contestant("conductor"), cell, 0, 400)
    outcomes, seen = recorded.outcomes, recorded.seen
    assert (seen.request["input_tokens"][:, 0] == cell.setting.part.traces[0].input_tokens).all()
    sources = Counter(outcomes["source"].tolist())
    assert sources[Source.LOCAL] and sources[Source.FETCH]
    for i in np.flatnonzero(outcomes["prefill"] >= 0):
        p, d, source = (int(outcomes[name][i]) for name in ("prefill", "decode", "source"))
        name = {Source.LOCAL: "ttft_local_s", Source.FETCH: "ttft_fetch_s"}[Source(source)]
        assert outcomes["predicted_ttft_s"][i] == seen.prefill[i, p][name]
        assert outcomes["predicted_tbt_s"][i] == seen.decode[i, d]["tbt_assigned_s"]
        assert (recorded.holders[i] >= 0) == (source == Source.FETCH)
        assert recorded.holders[i] != p
    assert seen.cluster["in_flight"][0, 0] == 0 and seen.cluster["in_flight"].max() > 5


class RejectsAll:
    """Sees no reason, and rejects."""

    def decide(self, observation: Any) -> Any:
        return np.zeros(len(observation.request), np.int64)


class TakesAll:
    """The first instances take everything; the decode instance checks again."""

    def decide(self, observation: Any) -> Any:
        return np.ones(len(observation.request), np.int64)


@pytest.mark.parametrize(
    ("policy", "change", "expected"),
    [
        ("tests.test_replay:RejectsAll", {}, {3}),
        ("tests.test_replay:RejectsAll", {"slo": {"ttft_s": 1e-9, "tbt_s": 0.1}}, {1}),
        ("tests.test_replay:RejectsAll", {"slo": {"ttft_s": 1e9, "tbt_s": 1e-9}}, {2}),
        ("random+none", {"decode_room": 20_000}, {5}),
        ("random+none", {"slo": {"ttft_s": 1e9, "tbt_s": 1e-9}}, set()),
        ("tests.test_replay:TakesAll", {"slo": {"ttft_s": 1e9, "tbt_s": 1e-9}}, {4}),
    ],
)
def test_why_a_request_was_rejected(policy: str, change: dict[str, Any], expected: set[int], tmp_path: Path) -> None:
    room, slo = change.get("decode_room"), change.get("slo")
    node = {"count": 2, "hardware": "h100x8-llama3-70b"}
    fields: dict[str, Any] = {
        "name": "small",
        "block_tokens": 512,
        "prefill": [node],
        "decode": [node | ({"decode_kv_tokens": room} if room else {})],
    }
    if slo:
        fields["slo"] = slo
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(fields))
    cell = cell_of(str(path), 60)
    recorded = replay.record(Contestant(policy), cell, 0, 60)
    trace = cell.setting.part.traces[0]
    found = replay.reasons(recorded, cell.setting.spec, trace.input_tokens + trace.output_tokens)
    assert set(found.tolist()) - {0} == expected
    assert ((found > 0) == (recorded.outcomes["status"] != Status.COMPLETED)).all()


# --- what is written -------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_leaderboard(tmp_path: Path, capsys: Any) -> None:
    given = [
        "--trace",
        "builtin:conversation",
        "--part",
        "validation",
        "--cluster",
        "3p3d",
        "--load",
        "1.2",
        "--warmup",
        "30",
    ]
    policies = ["--policies", ",".join(TWO), "--seeds", "1"]
    assert leaderboard.main([*policies, *given, "--json", "-"]) == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert replay.main([*policies, *given, "--out", str(tmp_path / "page.html")]) == 0
    page = read(tmp_path / "page.html")
    assert [policy["name"] for policy in page["policies"]] == list(TWO)
    for policy in page["policies"]:
        for key in replay.OF_SCORE:
            assert policy["score"][key] == pytest.approx(rows[policy["name"]][key], rel=1e-5, abs=1e-6), key
    assert (page["trace_checksum"], page["spec_checksum"]) == tuple(
        rows[TWO[0]][k] for k in ("trace_checksum", "spec_checksum")
    )


def test_requests_before_those_shown_are_drawn_while_they_are_there(file: Path) -> None:
    page = read(file)
    numbers = page["requests"]["number"]
    early = [i for i, number in enumerate(numbers) if number < 70]
    assert page["first"] == 70 and numbers[len(early) :] == list(range(70, 470))
    assert early == list(range(len(early))) and early
    left = [
        p["outcomes"]["finish_s"][i] or p["outcomes"]["kv_ready_s"][i] or -1 for i in early for p in page["policies"]
    ]
    assert max(left) > page["start_s"]
    for policy in page["policies"]:
        assert policy["score"]["offered"] == 400
        assert len(policy["seen"]["queue_ms"]) == 2 * 400 and len(policy["seen"]["batch"]) == 3 * 400


def test_how_busy_instances_were(file: Path) -> None:
    page = read(file)
    for policy in page["policies"]:
        o, stop = policy["outcomes"], page["requests"]["arrival_s"][-1]
        for p, busy in enumerate(policy["score"]["prefill_busy"]):
            spent = sum(
                max(0.0, min(end, stop) - max(start, page["start_s"]))
                for on, start, end in zip(o["prefill"], o["prefill_start_s"], o["prefill_end_s"], strict=True)
                if on == p
            )
            assert busy == pytest.approx(spent / (stop - page["start_s"]), abs=1e-3)
            assert 0 < busy <= 1


def test_five_thousand_requests_of_two_policies_are_under_5_mb(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    given = [
        "--part",
        "all",
        "--cluster",
        "8p8d",
        "--load",
        "1.5",
        "--policies",
        "conductor,random",
        "--out",
        str(path),
    ]
    assert replay.main(given) == 0
    assert read(path)["policies"][1]["score"]["offered"] == 5000
    assert path.stat().st_size < 5e6


def test_it_is_one_file_that_loads_nothing(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"https?://", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|@import", text)
    assert "default-src 'none'" in text and "unsafe" not in text
    assert not re.search(r"<[^>]*\s(style|on\w+)=|<link rel=.stylesheet|<script[^>]*\ssrc=", text)
    assert not re.search(r"\{(style|script|episode|\w+-hash)\}", text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--policies", "nobody"], "no policy is called 'nobody'"),
        (["--policies", "conductor:speed=1"], "no option 'speed'"),
        (["--policies", "random,conductor,smg"], "one policy or two, found 3"),
        (["--policies", "random", "--trace", "absent.jsonl"], "absent.jsonl"),
        (["--policies", "random", "--load", "1,2"], "2 are asked for"),
        (["--policies", "random", "--suite", "heldout", "--cells", "bursty*"], "2 are asked for"),
        (["--policies", "random", "--suite", "heldout", "--cells", "nothing"], "--cells nothing"),
        (["--policies", "random", "--cluster", "9x9"], "9x9"),
        (["--policies", "random", "--skip", "1000000"], "expected less"),
        (["--policies", "random", "--load", "1", "--capacity", "1"], "both give the load"),
    ],
)
def test_what_cannot_be_shown_is_one_line(given: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "page.html"
    assert replay.main([*given, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
    assert not out.exists()


def test_where_the_page_cannot_be_written_is_one_line(tmp_path: Path, capsys: Any) -> None:
    for out in (tmp_path / "absent" / "page.html", tmp_path):
        assert replay.main(["--policies", "random", "--out", str(out)]) == 2
        assert capsys.readouterr().err.startswith(f"error: --out {out}: expected a file")


# --- in a browser ----------------------------------------------------------------------------------


async def opened(browser: Any, file: Path, said: list[str], fragment: str = "", **options: Any) -> Any:
    """The page, opened from the disk."""
    page = await browsing.opened(browser, file.as_uri() + fragment, said, "body[data-ready]", **options)
    await settled(page)
    return page


async def settled(page: Any) -> None:
    """Until what was asked for is drawn."""
    await page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


PAINTED = """all => all.map(canvas => {
  const found = new Set(), part = canvas.getContext("2d").getImageData(canvas.width / 2, 0, 60, canvas.height);
  for (const word of new Uint32Array(part.data.buffer)) found.add(word);
  return found.size;
})"""


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}px")
async def test_it_draws(file: Path, browser: Any, size: tuple[int, int]) -> None:
    said: list[str] = []
    page = await opened(browser, file, said, viewport={"width": size[0], "height": size[1]}, color_scheme="light")
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the screen"
    canvases = page.locator("canvas")
    assert await canvases.count() == 3
    for canvas in await canvases.all():
        assert re.search(r"\d", await canvas.get_attribute("aria-label") or "")
        assert (await canvas.bounding_box())["width"] > 250
    for control in await page.locator("button, select, input").all():
        name = await control.evaluate("c => c.getAttribute('aria-label') || c.textContent || c.labels[0]?.textContent")
        assert name.strip()
    for scheme in ("light", "dark"):  # and it follows a change
        await page.emulate_media(color_scheme=scheme)
        await settled(page)
        assert await browsing.is_light(page, "ink('ink')") is (scheme == "light")
    assert min(await canvases.evaluate_all(PAINTED)) > 5  # once: Chromium warns of who reads a canvas often
    assert said == []
    await page.context.close()


async def test_what_it_says_of_the_difference_is_counted_here(file: Path, browser: Any) -> None:
    said: list[str] = []
    page = await opened(browser, file, said)
    episode = read(file)
    base = episode["requests"]["number"].index(70)
    outcomes = [policy["outcomes"] for policy in episode["policies"]]
    good = [np.array(o["good"][base:]) for o in outcomes]
    won, given_up = int((good[0] > good[1]).sum()), int((good[0] < good[1]).sum())
    assert won > 5 and given_up > 5
    about = await page.locator("#lost-about").inner_text()
    assert about == f"{TWO[0]} served {won} requests that {TWO[1]} lost, and lost {given_up} that it served."
    differ = [
        i + 70
        for i in range(400)
        if any(outcomes[0][name][base + i] != outcomes[1][name][base + i] for name in ("prefill", "decode", "source"))
    ]
    parted = await page.locator("#parted-about").inner_text()
    assert parted.startswith(f"{len(differ)} decisions of 400 differ") and f"is on request {differ[0]} at" in parted
    assert await page.locator("#parted tbody button").first.inner_text() == str(differ[0])
    # of those that the second lost, what was spent in vain, most first
    await page.locator("#who").select_option("1")
    assert f"{won} requests" in await page.locator("#lost caption").inner_text()
    vain = sorted((outcomes[1]["prefill_s"][base + i] or 0 for i in np.flatnonzero(good[0] > good[1])), reverse=True)
    column = 6
    shown = await page.locator(f"#lost tbody tr > :nth-child({column + 1})").all_inner_texts()
    assert shown == [f"{seconds:.2f}" for seconds in vain][: len(shown)] and len(shown) == min(100, won)
    await page.locator("#order").select_option("at")
    at = [float(text) for text in await page.locator("#lost tbody tr > :nth-child(2)").all_inner_texts()]
    assert at == sorted(at)
    lost = sum(int(text) for text in await page.locator("#how tbody tr > :nth-child(4)").all_inner_texts())
    assert lost == won
    summary = await page.locator("#summary").inner_text()
    assert f"{episode['policies'][0]['score']['goodput']:.4f}" in summary
    assert said == []


async def test_a_request_tells_what_was_known_chosen_and_became_of_it(file: Path, browser: Any) -> None:
    page = await opened(browser, file, [])
    episode = read(file)
    requests, blocks = episode["requests"], episode["block_tokens"]
    base = requests["number"].index(70)
    told: Counter[str] = Counter()
    sources = [policy["outcomes"]["source"][base:] for policy in episode["policies"]]
    fetches = [base + i for i in range(400) if Source.FETCH in (sources[0][i], sources[1][i])]
    for i in sorted({*range(base, base + 400, 16), *fetches[:5]}):
        await page.evaluate("i => choose(i)", i)
        for k, policy in enumerate(episode["policies"]):
            o, seen = policy["outcomes"], policy["seen"]
            text = await page.locator(f"#stories > div:nth-child({k + 1})").inner_text()
            p = o["prefill"][i]
            if p < 0:
                assert "Rejected at arrival" in text and replay.REASONS[o["reason"][i]] in text
                told["rejected"] += 1
                continue
            cached, queue_s = seen["local_blocks"][p * 400 + i - base], seen["queue_ms"][p * 400 + i - base] / 1e3
            fetched = f", {o['fetched_blocks'][i]} more fetched from p{o['holder'][i]}" if o["source"][i] == 1 else ""
            of = -(-requests["input_tokens"][i] // blocks)
            match = re.search(rf"Sent to p{p} with {cached} of {of} blocks cached{fetched}, queue ([\d.]+) s", text)
            assert match and float(match[1]) == pytest.approx(queue_s, abs=0.051)
            assert await page.locator(f"#stories > div:nth-child({k + 1}) tr.chosen").count() == 2
            told["fetched" if fetched else "sent"] += 1
            if o["status"][i] == Status.REJECTED_AT_DECODE:
                assert "were in vain" in text
            elif not o["good"][i]:
                assert re.search(r"T[TB]+T violated \(", text)
    assert min(told[kind] for kind in ("rejected", "sent", "fetched")) > 3


async def test_time_is_moved_by_keyboard_mouse_and_touch(file: Path, browser: Any) -> None:
    said: list[str] = []
    page = await opened(browser, file, said, viewport={"width": 1400, "height": 1200})

    async def span() -> tuple[float, float]:
        await settled(page)
        start, stop = re.findall(r"[\d.]+", await page.locator("#shown").inner_text())
        return float(start), float(stop)

    whole = await span()
    canvas = page.locator("#lanes canvas").first
    await canvas.focus()
    await page.keyboard.press("+")
    near = await span()
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2, abs=0.2)
    await page.keyboard.press("ArrowRight")
    later = await span()
    assert later[0] == pytest.approx(near[0] + (near[1] - near[0]) / 4, abs=0.2)
    await page.keyboard.press("0")
    assert await span() == whole
    await page.locator("#in").focus()
    await page.keyboard.press("Enter")
    assert await span() == near
    await canvas.scroll_into_view_if_needed()
    box = await canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 30
    await page.mouse.move(x, y)
    await page.mouse.down()
    await page.mouse.move(x - 100, y, steps=4)
    await page.mouse.up()
    assert (await span())[0] > near[0]
    await page.keyboard.down("Control")
    await page.mouse.wheel(0, -300)
    await page.keyboard.up("Control")
    pulled = await span()
    assert pulled[1] - pulled[0] < (near[1] - near[0]) / 2
    await canvas.evaluate(
        """canvas => {
          const box = canvas.getBoundingClientRect();
          canvas.setPointerCapture = () => {};
          const send = (kind, pointerId, x) => canvas.dispatchEvent(
            new PointerEvent(kind, { pointerId, clientX: box.x + x, clientY: box.y + 30, pointerType: "touch" }));
          send("pointerdown", 11, 200);
          send("pointerdown", 12, 300);
          send("pointermove", 12, 400);
          send("pointerup", 11, 200);
          send("pointerup", 12, 400);
        }"""
    )
    pinched = await span()
    assert pinched[1] - pinched[0] == pytest.approx((pulled[1] - pulled[0]) / 2, abs=0.2)
    assert said == []


async def test_a_click_on_a_bar_opens_its_request_and_its_address_does_too(file: Path, browser: Any) -> None:
    said: list[str] = []
    page = await opened(browser, file, said, viewport={"width": 1400, "height": 1200})
    canvas = page.locator("#lanes canvas").first
    await canvas.scroll_into_view_if_needed()
    where = await page.evaluate(
        """() => {
          const one = views[0], o = one.policy.outcomes;
          const longest = range(count).filter((i) => i >= base && o.prefill[i] >= 0)
            .sort((a, b) => o.prefill_s[b] - o.prefill_s[a])[0];
          look(R.arrival_s[longest] - 5, o.prefill_end_s[longest] + 5);
          const lane = one.lanes.find((l) => l.kind === "prefill" && l.instance === o.prefill[longest]);
          const middle = (o.prefill_start_s[longest] + o.prefill_end_s[longest]) / 2;
          return { number: R.number[longest], x: across(one.canvas)(middle), y: lane.y + lane.height - 4 };
        }"""
    )
    await settled(page)
    await canvas.hover(position={"x": where["x"], "y": where["y"]})
    assert f"request {where['number']}," in await page.locator("#under").inner_text()
    await canvas.click(position={"x": where["x"], "y": where["y"]})
    assert await page.locator("#request-title").inner_text() == f"Request {where['number']}"
    assert page.url.endswith(f"#request={where['number']}")
    await page.locator("#after").focus()
    await page.keyboard.press("Enter")
    assert await page.locator("#request-title").inner_text() == f"Request {where['number'] + 1}"
    await page.locator("#number").fill("100")
    await page.keyboard.press("Enter")
    assert await page.locator("#request-title").inner_text() == "Request 100"
    again = await opened(browser, file, said, "#request=123")
    assert await again.locator("#request-title").inner_text() == "Request 123"
    await again.locator("#parted tbody button").first.click()
    assert await again.evaluate("document.activeElement.id") == "request-title"
    assert said == []


async def test_one_policy_alone_and_a_name_that_is_markup(file: Path, browser: Any, tmp_path: Path) -> None:
    said: list[str] = []
    episode = read(file)
    episode["policies"] = [episode["policies"][1] | {"name": HOSTILE}]
    episode["command"] = HOSTILE
    write_page(episode, tmp_path / "page.html")
    page = await opened(browser, tmp_path / "page.html", said)
    assert await page.locator("img").count() == 0
    assert await page.locator("#parted-section").is_hidden() and await page.locator("#verdict").inner_text() == ""
    assert HOSTILE in await page.locator("#command").text_content()
    score = episode["policies"][0]["score"]
    assert f"{score['offered'] - score['good']:.0f} requests of 400" in await page.locator("#lost-about").inner_text()
    assert await page.locator("canvas").count() == 2
    assert said == []
