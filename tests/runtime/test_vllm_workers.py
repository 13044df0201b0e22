"""The workers' command, with something else in vLLM's place; the model they get. (Real ones: tests/live.)"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from runtime import calm_nixl, saved_first, tiny_model, vllm_workers
from runtime.local_workers import WorkersError, listens
from runtime.vllm_workers import VllmWorkers
from runtime.workers import Connector, Role, load_live_cluster

from .conftest import ROOT

SERVER = """
import http.server, sys
port = next(int(option.split("=")[1]) for option in sys.argv if option.startswith(("--port=", "--rpc_port=")))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path):
    """`stand_in(program)`: an environment whose Python runs this program, whatever it is asked to."""

    def make(program: str, *packages: str) -> Path:
        place = tmp_path / "environment"
        for name in ("vllm", "nixl", *packages):
            (place / "lib" / "python3.11" / "site-packages" / name).mkdir(parents=True)
        (place / "program.py").write_text(program)
        python = place / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {place / "program.py"} "$@"\n')
        python.chmod(0o755)
        return place

    return make


def test_workers_start_are_listed_and_end(stand_in):
    with VllmWorkers(2, 1, 1, environment=stand_in(SERVER)) as workers:
        assert all(workers.healthy(name) for name in ("p0", "p1", "d0", "b0"))
        cluster = load_live_cluster(workers.cluster_file)
        assert [(worker.id, worker.role) for worker in cluster.workers] == [
            ("p0", Role.PREFILL),
            ("p1", Role.PREFILL),
            ("d0", Role.DECODE),
            ("b0", Role.BOTH),
        ]
        assert all(worker.address == workers.address(worker.id) for worker in cluster.workers)
        assert all(bool(worker.kv_events) == (worker.role != Role.DECODE) for worker in cluster.workers)
        assert cluster.spec.block_tokens == vllm_workers.BLOCK_TOKENS
        processes = [psutil.Process(process.pid) for process in workers.processes.values()]
        workers.kill("p0")
        assert not workers.healthy("p0") and workers.healthy("p1")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    assert not workers.folder.exists()


def test_a_worker_that_does_not_come_up_is_named_with_what_it_said(stand_in):
    place = stand_in("import sys; print('no such device'); sys.exit(3)")
    with (
        pytest.raises(WorkersError, match=r"(?s)worker p0 has ended with status 3.*no such device"),
        VllmWorkers(environment=place),
    ):
        pass


def test_without_an_environment_the_command_says_how_to_make_one(tmp_path):
    with pytest.raises(WorkersError, match="python -m runtime.vllm_workers setup"), VllmWorkers(environment=tmp_path):
        pass
    answer = CliRunner().invoke(vllm_workers.app, ["run", "--environment", str(tmp_path)])
    assert answer.exit_code == 1


def test_a_master_of_the_store_is_started_beside_workers(stand_in):
    with VllmWorkers(connector=Connector.STORE, environment=stand_in(SERVER, "mooncake")) as workers:
        assert listens(workers.master)
        assert json.loads((workers.folder / "store.json").read_text())["master_server_address"] == workers.master
        assert all(worker.connector == Connector.STORE for worker in load_live_cluster(workers.cluster_file).workers)
    assert not listens(workers.master)


def test_a_master_that_does_not_come_up_is_named_with_what_it_needs(stand_in):
    place = stand_in("import sys; sys.exit('libibverbs.so.1: cannot open shared object file')", "mooncake")
    with (
        pytest.raises(WorkersError, match=r"(?s)^mooncake_master has ended with status 1:.*object file.*libibverbs1"),
        VllmWorkers(connector=Connector.STORE, environment=place),
    ):
        pass


def test_an_environment_gets_what_it_lacks(stand_in):
    place = stand_in("import sys; open(sys.argv[0] + '.ran', 'a').write(' '.join(sys.argv[1:]) + '\\n')")
    with pytest.raises(WorkersError, match="no Mooncake Store"):
        VllmWorkers(connector=Connector.STORE, environment=place).prepare()
    vllm_workers.set_up(place)
    (ran,) = (place / "program.py.ran").read_text().splitlines()
    assert ran.endswith(f"install {vllm_workers.MOONCAKE}")


def test_only_connectors_that_work_without_a_gpu():
    with pytest.raises(WorkersError, match="nixl and store"):
        VllmWorkers(connector=Connector.MOONCAKE)


def test_the_environment_is_where_it_is_said_to_be(monkeypatch, tmp_path):
    monkeypatch.setenv("CONDUCTOR_LIVE_ENV", str(tmp_path))
    assert vllm_workers.default_environment() == tmp_path and not vllm_workers.is_set_up(tmp_path)
    monkeypatch.delenv("CONDUCTOR_LIVE_ENV")
    assert "0.32.0" in vllm_workers.default_environment().name


def test_the_command_runs_until_it_is_interrupted(stand_in, tmp_path):
    cluster = tmp_path / "cluster.yaml"
    place = stand_in(SERVER)
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime.vllm_workers", "run", "--environment", place, "--cluster", cluster],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"{cluster}: p0, d0")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2 and len(load_live_cluster(cluster).workers) == 2
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    deadline = time.monotonic() + 10
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_vllm_finds_the_plugins(tmp_path):
    """As it looks for plugins: by entry points of what is on its path."""
    for name in ("calm_nixl", "saved_first"):
        vllm_workers._write_plugin(tmp_path, name)
    program = (
        "from importlib.metadata import entry_points; "
        "print(*sorted(found.load().__module__ for found in entry_points(group='vllm.general_plugins')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["calm_nixl", "saved_first"]


def test_the_plugin_calms_nixl(monkeypatch):
    """In a NIXL that fixes the delay at 0, as the real one does."""

    class Config:
        pthrDelay = -1

    agents: list[tuple[str, Config]] = []
    api = types.ModuleType("nixl._api")
    api.nixlBind = types.SimpleNamespace(nixlAgent=lambda name, config: agents.append((name, config)))  # type: ignore[attr-defined]
    package = types.ModuleType("nixl")
    package._api = api  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    calm_nixl.register()
    config = Config()
    config.pthrDelay = 0
    api.nixlBind.nixlAgent("worker", config)
    assert agents == [("worker", config)] and config.pthrDelay == calm_nixl.DELAY_US > 0


def test_the_plugin_waits_until_blocks_are_saved(monkeypatch):
    """With a connector that saves in the background, as the real one does."""

    class Worker:
        def __init__(self) -> None:
            self.saved: list[str] = []
            self.kv_send_thread = types.SimpleNamespace(request_queue=queue.Queue())

        def wait_for_save(self, metadata: str) -> None:
            self.kv_send_thread.request_queue.put(metadata)
            threading.Timer(0.2, self.put).start()

        def put(self) -> None:
            self.saved.append(self.kv_send_thread.request_queue.get())
            self.kv_send_thread.request_queue.task_done()

    place = types.ModuleType("worker")
    place.MooncakeStoreWorker = Worker  # type: ignore[attr-defined]
    name = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker"
    for i in range(1, name.count(".") + 1):
        monkeypatch.setitem(sys.modules, name.rsplit(".", i)[0], types.ModuleType(name.rsplit(".", i)[0]))
    monkeypatch.setitem(sys.modules, name, place)
    saved_first.register()
    worker = Worker()
    worker.wait_for_save("blocks")
    assert worker.saved == ["blocks"]


def test_the_model_is_one_that_libraries_read(tmp_path):
    tiny_model.write_model(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    config = json.loads((tmp_path / "config.json").read_text())
    stop = 0
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        assert start == stop and end - start == 4 * np.prod(tensor["shape"]), name
        stop = end
    assert len(data) == 8 + size + stop
    embedding = header["model.embed_tokens.weight"]
    assert embedding["shape"] == [config["vocab_size"], config["hidden_size"]]
    first = np.frombuffer(data, np.float32, 1000, 8 + size)
    assert 0.9 < first.std() < 1.1
    keys = header["model.layers.0.self_attn.k_proj.weight"]["shape"][0]
    assert 2 * config["num_hidden_layers"] * keys * 4 == tiny_model.KV_BYTES_PER_TOKEN
    tiny_model.write_model(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == data


def test_the_tokenizer_has_a_token_for_each_byte(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tiny_model.write_model(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Grüße, 世界!\n\t\x00"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
