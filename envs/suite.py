"""Suites: which cells a leaderboard is made of, by name or from a YAML file like `suites.yaml`."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .spec import SpecError, Strict, fields_of, validated


class SuiteSetting(Strict):
    """Part of a trace on a cluster, at several loads."""

    name: str = Field(pattern=r"^[\w.-]+$")
    trace: str = Field(min_length=1, description="as `traces.load` takes it")
    part: Literal["train", "validation", "test", "all"]
    cluster: str = Field(min_length=1, description="as `envs.spec.load_cluster` takes it")
    capacity: tuple[PositiveFloat, ...] = Field(min_length=1, description="loads, as multiples of the capacity")


class SuiteCell(NamedTuple):
    """A setting at one load; `share` is the multiple of its capacity."""

    name: str
    setting: SuiteSetting
    share: float


class Suite(Strict):
    """Cells that are evaluated together."""

    name: str
    about: str = ""
    warmup: NonNegativeInt = Field(default=0, description="requests before a part that are simulated and not counted")
    seeds: PositiveInt = Field(default=4, description="replays of a cell, unless told")
    settings: tuple[SuiteSetting, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _cells_differ(self) -> Suite:
        names = [cell.name for cell in self.cells]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two cells are called {twice!r}; expected names and loads that differ")
        return self

    @property
    def cells(self) -> list[SuiteCell]:
        """All of them, in the order of the settings and of their loads."""
        return [
            SuiteCell(f"{setting.name}-{share:g}x", setting, share)
            for setting in self.settings
            for share in setting.capacity
        ]


@cache
def _builtin() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((resources.files(__package__) / "suites.yaml").read_text()))


def suite_names() -> list[str]:
    """Names of the built-in suites."""
    return list(_builtin())


def load_suite(name: str | Path) -> Suite:
    """A built-in suite by name (`heldout`), or a YAML file with the fields of one.

    Raises:
        SpecError: no such suite or file, or a field that is unknown or impossible; names the field.
    """
    if str(name) in _builtin():
        return validated(Suite, {"name": str(name)} | _builtin()[str(name)], str(name))
    path = Path(name)
    if not path.is_file():
        raise SpecError(
            f"no suite is called {str(name)!r} and no such file exists; built in are {', '.join(suite_names())}"
        )
    return validated(Suite, fields_of(path, "settings"), str(path))
