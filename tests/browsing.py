"""A page in a browser, as the tests of our pages open it (the fixture `browser` is in conftest.py)."""

from __future__ import annotations

import re
from typing import Any

OF_THE_FILE = ("file:", "data:")


async def opened(
    browser: Any, address: str, said: list[str], ready: str, own: tuple[str, ...] = OF_THE_FILE, **options: Any
) -> Any:
    """A page in a context of its own, when an element `ready` is there.

    Args:
        said: gets what the page's console says, and every address it asks for that does not begin with one of `own`.
        options: of the context.
    """
    context = await browser.new_context(**options)
    page = await context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(own) else said.append(asked.url))
    await page.goto(address)
    await page.wait_for_selector(ready)
    return page


async def is_light(page: Any, ink: str = "getComputedStyle(document.body).color") -> bool:
    """Whether the page's ground is brighter than its ink, which is a JavaScript expression."""
    drawn = await page.evaluate(f"[getComputedStyle(document.body).backgroundColor, {ink}]")
    ground, written = (sum(map(int, re.findall(r"\d+", shade)[:3])) for shade in drawn)
    return bool(ground > written)
