"""Whether two results of `leaderboard.py --json` say the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

OF_THE_RUN = frozenset(("decision_us", "decision_alone_us", "code_version", "command", "notes"))
"""What is measured by the clock, or says how it was run: may differ where all figures are the same."""


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Every value that differs, as `place: before, now`; a row's place is its policy and cell."""
    one, other = dict(_values(before)), dict(_values(now))
    places = dict.fromkeys([*one, *other])
    return [
        f"{place}: {one.get(place, 'absent')!r}, now {other.get(place, 'absent')!r}"
        for place in places
        if place not in one or place not in other or one[place] != other[place]
    ]


def _values(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """All that is in a document, by its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in OF_THE_RUN:
                yield from _values(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            named = [str(inner[key]) for key in ("policy", "cell") if key in inner] if isinstance(inner, dict) else []
            yield from _values(inner, f"{place}[{', '.join(named) or i}]")
    else:
        yield place, value
