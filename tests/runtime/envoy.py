"""A real Envoy in front of an endpoint picker (deploy/envoy.yaml, with other ports), and the picker in this process."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import grpc
import yaml

from envs.spec import load_cluster
from runtime.conductor import Conductor
from runtime.ext_proc import ExternalProcessor, Options, Scheduler, add_health, add_to_server, server_options
from runtime.workers import Role, Worker, resized

from .backends import free_port

DEPLOYED = Path(__file__).parents[2] / "deploy" / "envoy.yaml"
BINARY = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
SUBSET_HEADER = "x-test-subset"  # becomes the subset hint, as a gateway's own filters would set it
FAILURES = (
    "streams_failed",
    "message_timeouts",
    "spurious_msgs_received",
    "failure_mode_allowed",
    "rejected_header_mutations",
)
PREFILL = "127.0.0.1:7001"  # where nobody is


def conductor(decodes: list[str], policy: str = "round_robin", **options: Any) -> Conductor:
    """The conductor of a cluster with one prefill worker and decode workers at these addresses."""
    workers = [Worker(id="prefill-0", role=Role.PREFILL, address=PREFILL)]
    workers += [Worker(id=f"decode-{i}", role=Role.DECODE, address=place) for i, place in enumerate(decodes)]
    return Conductor(resized(load_cluster("1p2d"), tuple(workers)), policy, **options)


class Picker:
    """`async with Picker(scheduler) as picker`: an endpoint picker that listens at `picker.address`."""

    def __init__(self, scheduler: Scheduler, options: Options | None = None) -> None:
        self.scheduler = scheduler
        self.options = options or Options()
        self.processor: ExternalProcessor
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Picker:
        self._server = grpc.aio.server(options=server_options(self.options))
        self.processor = add_to_server(self._server, self.scheduler, options=self.options)
        add_health(self._server, self.scheduler)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)


class Envoy:
    """`async with Envoy(folder, picker_port) as envoy`: Envoy listens at `envoy.url`.

    Args:
        folder: where its configuration and its log go. picker: port of the endpoint picker.
        workers: addresses for the cluster that takes fallbacks; None uses the ORIGINAL_DST cluster.
        request_body, response_body: body modes, with headers sent; None leaves what deploy/envoy.yaml has.
    """

    def __init__(
        self,
        folder: Path,
        picker: int,
        *,
        workers: list[str] | None = None,
        request_body: str | None = None,
        response_body: str | None = None,
    ) -> None:
        self.folder = folder
        self.port, self.admin = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        deployed = yaml.safe_load(DEPLOYED.read_text())
        self._config = self._configure(deployed, picker, workers, request_body, response_body)
        self._process: subprocess.Popen[bytes] | None = None

    def _configure(
        self, config: Any, picker: int, workers: list[str] | None, request_body: str | None, response_body: str | None
    ) -> Any:
        config["admin"]["address"]["socket_address"]["port_value"] = self.admin
        resources = config["static_resources"]
        listener = resources["listeners"][0]
        listener["address"]["socket_address"]["port_value"] = self.port
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        picking = manager["http_filters"][0]["typed_config"]
        for direction, mode in (("request", request_body), ("response", response_body)):
            if mode is not None:
                trailers = "SEND" if mode == "FULL_DUPLEX_STREAMED" else "SKIP"
                picking["processing_mode"][f"{direction}_header_mode"] = "SEND"
                picking["processing_mode"][f"{direction}_body_mode"] = mode
                picking["processing_mode"][f"{direction}_trailer_mode"] = trailers
        manager["http_filters"].insert(
            0,
            {
                "name": "envoy.filters.http.header_to_metadata",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
                    "request_rules": [
                        {
                            "header": SUBSET_HEADER,
                            "on_header_present": {
                                "metadata_namespace": "envoy.lb.subset_hint",
                                "key": "x-gateway-destination-endpoint-subset",
                                "type": "STRING",
                            },
                            "remove": True,
                        }
                    ],
                },
            },
        )
        clusters = {cluster["name"]: cluster for cluster in resources["clusters"]}
        place = clusters["endpoint_picker"]["load_assignment"]["endpoints"][0]["lb_endpoints"][0]
        place["endpoint"]["address"]["socket_address"]["port_value"] = picker
        if workers is not None:
            clusters["listed_workers"]["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
                {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
                for host, _, port in (worker.rpartition(":") for worker in workers)
            ]
            route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
            route["cluster"] = "listed_workers"
            route["retry_policy"] = {"retry_on": "connect-failure,refused-stream", "num_retries": 3}
        return config

    async def __aenter__(self) -> Envoy:
        assert BINARY is not None
        path = self.folder / f"envoy-{self.port}.yaml"
        path.write_text(yaml.safe_dump(self._config))
        command = [BINARY, "-c", str(path), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
        with (self.folder / f"envoy-{self.port}.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        async with aiohttp.ClientSession() as session:
            for _ in range(400):
                if self._process.poll() is not None:
                    break
                try:
                    async with session.get(f"http://127.0.0.1:{self.admin}/ready") as answer:
                        stats = await self.stats("cluster.endpoint_picker.membership_healthy")
                        if answer.status == 200 and any(stats.values()):
                            return self
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)
        await self._end()
        raise RuntimeError("Envoy did not start: " + (self.folder / f"envoy-{self.port}.log").read_text()[-2000:])

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose names have `pattern` in them."""
        url = f"http://127.0.0.1:{self.admin}/stats?filter={re.escape(pattern)}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            text = await answer.text()
        lines = (line.rpartition(": ") for line in text.splitlines())
        return {name: int(value) for name, _, value in lines if value.isdigit()}

    async def failures(self) -> dict[str, int]:
        """What went wrong between Envoy and the picker: all zero where nothing did."""
        stats = await self.stats(".ext_proc.")
        return {name: value for name, value in stats.items() if name.endswith(FAILURES) and value}
