"""`python -m runtime.conformance`: try an endpoint picker, and say what it does not do."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from .cases import CASES
from .verdict import report, try_cases
from .wire import Target

STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def _show(console: Console, said: dict[str, Any]) -> None:
    table = Table(title=f"Endpoint picker at {said['target']}", title_justify="left")
    for column in ("case", "level", "result", "what was found"):
        table.add_column(column, overflow="fold")
    for result in said["cases"]:
        style = STYLES[result["status"]]
        found = result["found"] or ""
        if result["expected"]:
            found = f"expected {result['expected']}, found {found}"
        table.add_row(result["name"], result["level"], f"[{style}]{result['status']}[/]", found)
    console.print(table)
    for result in said["cases"]:
        if result["status"] == "failed":
            console.print(f"[bold]{result['name']}[/] ({result['source']}): {result['requirement']}", highlight=False)
    verdict = "conforms" if not said["failed_must"] else f"does not conform: {said['failed_must']} MUST failed"
    console.print(
        f"{said['passed']} passed, {said['failed']} failed, {said['skipped']} skipped: {verdict}", highlight=False
    )


def main(
    target: Annotated[str, typer.Option(help="The picker's gRPC address, host:port.")] = "",
    json: Annotated[str, typer.Option(help="Write the results as JSON to this file; - for standard output.")] = "",
    endpoints: Annotated[str, typer.Option(help="Endpoints it may choose, comma-separated; else they are found.")] = "",
    model: Annotated[str, typer.Option(help="Name of a model it serves.")] = "test-model",
    timeout: Annotated[float, typer.Option(help="Seconds an answer may take.", min=0.1)] = 5.0,
    only: Annotated[list[str] | None, typer.Option(help="Try this case only; may be given again.")] = None,
    provoke: Annotated[bool, typer.Option(help="Bring the target to refuse requests, by overload if need be.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False,
) -> None:
    """Try an Envoy external processing endpoint picker against what gateways need of it.

    Exit status: 0 where no MUST failed, 1 where one did, 2 where nothing could be tried.
    """
    names = {one.name for one in CASES}
    unknown = sorted(set(only or ()) - names)
    if unknown:
        _stop(f"--only: no case is called {unknown[0]!r}; --list lists them")
    chosen = [one for one in CASES if not only or one.name in only]
    if list_:
        for one in chosen:
            print(f"{one.name:32} {one.level:6} {one.requirement}  [{one.source}]")
        return
    host, colon, port = target.rpartition(":")
    if not colon or not host or not port.isdigit():
        _stop(f"--target: expected host:port, found {target!r}")
    given = [place.strip() for place in endpoints.split(",") if place.strip()]
    asked = Target(target, timeout_s=timeout, endpoints=given, model=model, provoke=provoke)
    try:
        results = asyncio.run(try_cases(asked, chosen))
    except ConnectionError as error:
        _stop(str(error))
    said = report(target, results)
    if json == "-":
        sys.stdout.write(orjson.dumps(said, option=orjson.OPT_INDENT_2).decode() + "\n")
    elif json:
        Path(json).write_bytes(orjson.dumps(said, option=orjson.OPT_INDENT_2))
    _show(Console(stderr=json == "-"), said)
    raise typer.Exit(1 if said["failed_must"] else 0)


def _stop(message: str) -> None:
    print(message, file=sys.stderr)
    raise typer.Exit(2)


def run() -> None:
    """The command."""
    typer.run(main)


if __name__ == "__main__":
    run()
