"""The conformance kit: our endpoint picker passes, and pickers with a fault do not."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpc_reflection.v1alpha import reflection

from runtime.conformance.cases import CASES
from runtime.conformance.verdict import report, try_cases
from runtime.conformance.wire import Target
from runtime.ext_proc import SERVICE, Options

from .backends import free_port
from .envoy import Picker, conductor

ROOT = Path(__file__).parents[2]
PLACES = ["127.0.0.1:8001", "127.0.0.1:8002"]
DESTINATION = "x-gateway-destination-endpoint"


def failures(results: list[dict[str, Any]]) -> dict[str, str]:
    return {
        result["name"]: f"expected {result['expected']}, found {result['found']}"
        for result in results
        if result["status"] == "failed"
    }


# ---- ours ----


@pytest.mark.parametrize("observe", [False, True])
async def test_ours_conforms(observe: bool) -> None:
    options = Options(observe_responses=observe, fallbacks=2)
    async with Picker(conductor(PLACES, "conductor+slo"), options) as picker:
        reflection.enable_server_reflection((SERVICE,), picker._server)
        results = await try_cases(Target(picker.address, provoke=True))
        assert failures(results) == {}
        said = report(picker.address, results)
        assert said["passed"] == len(CASES) - said["skipped"] and said["failed"] == said["failed_must"] == 0
        assert {result["name"] for result in results if result["status"] == "skipped"} <= {"reflection"}
        assert picker.processor.streams_open == 0


async def command(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "runtime.conformance", *arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_command(tmp_path: Path) -> None:
    async with Picker(conductor(PLACES)) as picker:
        code, out, err = await command("--target", picker.address, "--json", "-", "--endpoints", ",".join(PLACES))
        said = json.loads(out)
        assert code == 0, err
        assert said["target"] == picker.address and said["failed"] == 0
        assert said["passed"] + said["skipped"] == len(said["cases"]) == len(CASES)
        assert "conforms" in err
        one = said["cases"][0]
        assert {"name", "level", "status", "requirement", "source", "expected", "found", "seconds"} <= one.keys()

        file = tmp_path / "results.json"
        code, out, _ = await command("--target", picker.address, "--json", str(file), "--only", "header_only_request")
        assert code == 0 and "1 passed, 0 failed" in out
        assert [result["name"] for result in json.loads(file.read_bytes())["cases"]] == ["header_only_request"]


async def test_command_refuses() -> None:
    (code, out, _), (unknown, _, why), (wrong, _, where), (nobody, _, who) = await asyncio.gather(
        command("--list"),
        command("--target", "127.0.0.1:1", "--only", "nothing"),
        command("--target", "nowhere"),
        command("--target", f"127.0.0.1:{free_port()}", "--timeout", "0.5"),
    )
    assert code == 0 and len(out.splitlines()) == len(CASES)
    assert unknown == 2 and "no case is called 'nothing'" in why
    assert wrong == 2 and "--target: expected host:port" in where
    assert nobody == 2 and "nobody answers there" in who


def test_cases_are_well_described() -> None:
    assert len({one.name for one in CASES}) == len(CASES)
    for one in CASES:
        assert one.level in ("MUST", "SHOULD", "MAY") and one.source
        assert one.requirement.endswith(".") and len(one.requirement) > 30


def test_the_kit_knows_nothing_of_ours() -> None:
    for file in (ROOT / "runtime" / "conformance").glob("*.py"):
        imported = [line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert not [line for line in imported if line.startswith(("from ..", "from runtime", "import runtime"))]


# ---- others ----


class Naive:
    """The least an endpoint picker can be, with one fault; it takes turns, and reads no body."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.turn = 0
        self.broken = False
        self.port = 0

    async def __aenter__(self) -> Naive:
        self.server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=ext_proc.ProcessingRequest.FromString,
            response_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
        )
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.server.stop(None)

    async def process(self, _: Any, context: Any) -> None:
        first = await context.read()
        if self.broken or first.WhichOneof("request") != "request_headers":
            return
        place = self.choose(first)
        if not place:
            await context.write(self.refusal(503))
            return
        head = self.head(first, place)
        if first.request_headers.end_of_stream:
            await context.write(head)
            return
        body, trailers = b"", False
        while True:
            message = await context.read()
            if message is grpc.aio.EOF:
                self.broken = self.fault == "breaks when a client goes"
                return
            if message.WhichOneof("request") == "request_trailers":
                trailers = True
                break
            body += message.request_body.body
            if message.request_body.end_of_stream:
                break
        await self.answer(context, head, body, trailers)

    def choose(self, message: Any) -> str:
        places = PLACES
        spaces = message.metadata_context.filter_metadata
        if "envoy.lb.subset_hint" in spaces and self.fault != "ignores the subset":
            hint = spaces["envoy.lb.subset_hint"].fields[DESTINATION + "-subset"]
            wanted = [value.string_value for value in hint.list_value.values] + hint.string_value.split(",")
            places = [place for place in places if place in [one.strip() for one in wanted]]
            if self.fault == "takes an unknown subset for none" and not places:
                places = PLACES
        self.turn += 1
        return places[self.turn % len(places)] if places else ""

    def refusal(self, status: int) -> Any:
        message = ext_proc.ProcessingResponse()
        message.immediate_response.status.code = status
        return message

    def head(self, first: Any, place: str) -> Any:
        message = ext_proc.ProcessingResponse()
        given = {header.key: header.raw_value for header in first.request_headers.headers.headers}
        if self.fault == "believes the client" and DESTINATION in given:
            place = given[DESTINATION].decode()
        common = message.request_headers.response
        common.clear_route_cache = True
        if self.fault != "sets no header":
            option = common.header_mutation.set_headers.add()
            option.header.key = DESTINATION
            option.header.raw_value = (place.replace(":", " ") if self.fault == "no port" else place).encode()
            if self.fault == "value twice":
                option.header.value = place
        if self.fault == "wrong length":
            option = common.header_mutation.set_headers.add()
            option.header.key = "content-length"
            option.header.raw_value = b"1"
        if self.fault != "no metadata":
            said = PLACES[0] + "0" if self.fault == "other metadata" else place
            message.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value = said
        if self.fault == "drains":
            return message.SerializeToString() + b"\x58\x01"  # field 11
        return message

    async def answer(self, context: Any, head: Any, body: bytes, trailers: bool) -> None:
        size = 100_000 if self.fault == "large pieces" else 60_000
        if self.fault == "loses bytes" and len(body) > size:
            body = body[:-1]
        if self.fault == "decodes":
            body = body.decode("utf-8", "replace").encode() if len(body) < 3000 else body[:3000] + body[3000:].upper()
        messages = []
        for start in range(0, max(1, len(body)), size):
            message = ext_proc.ProcessingResponse()
            streamed = message.request_body.response.body_mutation.streamed_response
            streamed.body = body[start : start + size]
            last = start + size >= len(body) and (not trailers or self.fault == "ends before trailers")
            streamed.end_of_stream = last or self.fault == "ends with every piece"
            messages.append(message)
        if self.fault == "body first":
            messages.insert(1, head)
        else:
            messages.insert(0, head)
        if trailers:
            message = ext_proc.ProcessingResponse()
            message.request_trailers.SetInParent()
            messages.append(message)
        for message in messages:
            await context.write(message)
        if self.fault == "mixes up responses" and await context.read() is not grpc.aio.EOF:
            message = ext_proc.ProcessingResponse()
            message.response_headers.SetInParent()
            await context.write(message)
            await context.read()
            message.response_body.response.body_mutation.streamed_response.end_of_stream = True
            await context.write(message)
        if self.fault == "dies after the request":
            await context.abort(grpc.StatusCode.INTERNAL, "no more")


OFTEN_MISSING = {name for name in (one.name for one in CASES) if name.startswith("health_")} | {
    "dropped_reason",
    "invalid_json",
    "missing_model",
    "error_body",
    "client_cannot_name_prefiller",
}


async def found_in(fault: str) -> set[str]:
    async with Naive(fault) as picker:
        results = await try_cases(Target(f"127.0.0.1:{picker.port}", timeout_s=1.0))
    return set(failures(results)) - OFTEN_MISSING


async def test_least_picker() -> None:
    """What a picker that reads no bodies leaves out is health and refusals, nothing that would break a gateway."""
    assert await found_in("") == set()


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("sets no header", "destination_header"),
        ("no port", "destination_header"),
        ("value twice", "header_value_is_raw"),
        ("no metadata", "destination_metadata"),
        ("other metadata", "destination_metadata"),
        ("wrong length", "content_length_agrees"),
        ("drains", "reserved_fields"),
        ("believes the client", "client_cannot_choose"),
        ("ignores the subset", "subset_of_one"),
        ("takes an unknown subset for none", "subset_without_endpoint"),
        ("loses bytes", "body_of_500_kb"),
        ("decodes", "body_of_500_kb"),
        ("large pieces", "piece_size"),
        ("ends with every piece", "body_of_500_kb"),
        ("ends before trailers", "trailers_end_the_body"),
        ("body first", "answer_order"),
        ("breaks when a client goes", "client_gone"),
        ("mixes up responses", "response_events"),
        ("dies after the request", "response_events"),
    ],
)
async def test_faults_are_found(fault: str, case: str) -> None:
    chosen = [one for one in CASES if one.name == case]
    async with Naive(fault) as picker:
        (result,) = await try_cases(Target(f"127.0.0.1:{picker.port}", timeout_s=1.0), chosen)
    assert result["status"] == "failed", result
    assert result["expected"] and result["found"]
