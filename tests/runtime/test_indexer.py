"""The indexer API over real HTTP: what events of a registration store, queries of its namespace find, and no others."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import asynccontextmanager

import aiohttp
import msgpack
import msgspec
import numpy as np
import pytest
import xxhash
import zmq
import zmq.asyncio
from aiohttp import web

from runtime.block_hash import address, hash_blocks, namespace, signed
from runtime.conductor import Conductor
from runtime.indexer import LARGEST_BODY, add_routes, service_of, stream_of
from runtime.kernel.index_match import ANY, COLUMNS, count_blocks, match_media
from runtime.kernel.json_integers import NO_ARRAY, scan_integers
from runtime.kv_events import KvEventSubscriber
from runtime.prefix_index import Medium, PrefixIndex
from runtime.sidecar import Options, Sidecar
from runtime.workers import Role, load_live_cluster

from .backends import free_port

BLOCK = 16
CLUSTER = """
block_tokens: 16
model: {kv_bytes_per_token: 327680, layers: 80}
prefill: [{count: 2, hardware: a800x8-llama2-70b}]
decode: [{count: 1, hardware: a800x8-llama2-70b}]
workers:
  - {id: prefill-0, role: prefill, address: "127.0.0.1:8100", labels: {rack: a}}
  - {id: prefill-1, role: prefill, address: "127.0.0.1:8101", kv_events: "tcp://127.0.0.1:9", labels: {rack: b}}
  - {id: decode-0, role: decode, address: "127.0.0.1:8200"}
"""


class Around:
    """A process around the API: follows the workers' events as the sidecar does."""

    def __init__(self, conductor: Conductor) -> None:
        self.conductor = conductor
        self.subscribers: dict[str, KvEventSubscriber] = {}
        self.closing: list[asyncio.Task[None]] = []

    def membership(self) -> None:
        state = self.conductor.state
        wanted = {worker.id: worker for worker in state.prefills if worker.kv_events}
        for name, subscriber in list(self.subscribers.items()):
            worker = wanted.get(name)
            now = worker and (worker.kv_events, worker.kv_replay or None)
            if now != (subscriber.endpoint, subscriber.replay_endpoint):
                self.closing.append(asyncio.ensure_future(self.subscribers.pop(name).close()))
            else:
                subscriber.instance = state.prefill_of[name]
        for name, worker in wanted.items():
            if name not in self.subscribers:
                where, replay = worker.kv_events, worker.kv_replay or None
                self.subscribers[name] = KvEventSubscriber(
                    state.index, state.prefill_of[name], where, replay, stream=stream_of(worker), name=name
                )
                self.subscribers[name].start()

    def kv_cursor(self, worker_id: str) -> tuple[int, bool]:
        subscriber = self.subscribers.get(worker_id)
        return (subscriber.last_seq, subscriber.synced) if subscriber else (-1, False)

    async def close(self) -> None:
        await asyncio.gather(*self.closing, *(subscriber.close() for subscriber in self.subscribers.values()))


class Served:
    """The API at an address."""

    def __init__(self, around: Around, url: str, session: aiohttp.ClientSession) -> None:
        self.around, self.url, self.session = around, url, session
        self.conductor = around.conductor
        self.index = around.conductor.state.index

    async def post(self, path: str, body, status: int = 200):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data) as response:
            answer = await response.json()
            assert response.status == status, answer
            return answer

    async def get(self, path: str):
        async with self.session.get(self.url + path) as response:
            assert response.status == 200
            return await response.json()

    async def register(self, instance="prefill-0", *, status=200, rank=0, **fields):
        body = {
            "endpoint": f"tcp://127.0.0.1:{20000 + len(self.conductor.workers) * 10 + rank}",
            "type": "vLLM",
            "modelname": "deepseek",
            "instance_id": instance,
            "block_size": BLOCK,
            "dp_rank": rank,
        }
        return await self.post("/register", body | fields, status)

    async def query(self, tokens, *, status=200, **fields):
        body = {"model": "deepseek", "token_ids": np.asarray(tokens).tolist(), "block_size": BLOCK}
        return await self.post("/query", body | fields, status)

    def where(self, worker_id: str) -> int:
        return self.conductor.state.prefill_of[worker_id]

    def store(self, worker_id: str, medium: Medium, tokens, **names) -> None:
        """As an event of the worker's registration would."""
        names = {"model": "deepseek"} | names
        self.index.store(self.where(worker_id), medium, hash_blocks(tokens, BLOCK, namespace=namespace(**names)))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    file = tmp_path_factory.mktemp("cluster") / "live.yaml"
    file.write_text(CLUSTER)
    return load_live_cluster(file)


@asynccontextmanager
async def serving(cluster):
    around = Around(Conductor(cluster, "conductor", blocks=1 << 15, in_flight=64))
    app = web.Application()  # with its limit of 1 MiB, as the metrics server makes it
    add_routes(around)(app)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        yield Served(around, f"http://127.0.0.1:{runner.addresses[0][1]}", session)
    await around.close()
    await runner.cleanup()


@pytest.fixture
async def api(cluster):
    async with serving(cluster) as served:
        yield served


TOKENS = np.arange(1000, 1000 + 10 * BLOCK, dtype=np.uint32)


def answer(longest, gpu=0, cpu=0, disk=0, **dp):
    return {"longest_matched": longest, "GPU": gpu, "CPU": cpu, "DISK": disk, "DP": dp or {"0": longest}}


# --- the shape of answers --------------------------------------------------------------------------------------------


async def test_an_answer_has_tokens_by_medium_and_rank(api):
    await api.register("prefill-0")
    await api.register("prefill-0", rank=1)
    api.store("prefill-0", Medium.GPU, TOKENS[: 2 * BLOCK])
    api.store("prefill-0", Medium.CPU, TOKENS[: 4 * BLOCK])
    api.store("prefill-0#dp1", Medium.GPU, TOKENS[: 3 * BLOCK])
    hashes = hash_blocks(TOKENS, BLOCK, namespace=namespace("deepseek"))
    api.index.store(api.where("prefill-0#dp1"), Medium.DISK, hashes[3:5], parent=int(hashes[2]))
    expected = {
        "longest_matched": 5 * BLOCK,  # of rank 1: three blocks on GPU, and two on disk behind them
        "GPU": 3 * BLOCK,
        "CPU": 4 * BLOCK,
        "DISK": 0,  # what is on disk does not start at the first block
        "DP": {"0": 4 * BLOCK, "1": 5 * BLOCK},
    }
    assert await api.query(TOKENS) == {"default": {"prefill-0": expected}}
    assert await api.query(TOKENS, instance_id="prefill-0") == {"default": {"prefill-0": expected}}
    assert await api.query(TOKENS, instance_id="prefill-1") == {"default": {}}
    assert await api.query(TOKENS[: 2 * BLOCK + 5]) == {
        "default": {"prefill-0": answer(2 * BLOCK, 2 * BLOCK, 2 * BLOCK, **{"0": 2 * BLOCK, "1": 2 * BLOCK})}
    }
    assert await api.query([]) == {"default": {"prefill-0": answer(0, **{"0": 0, "1": 0})}}
    assert await api.query(TOKENS + 1) == {"default": {"prefill-0": answer(0, **{"0": 0, "1": 0})}}


async def test_what_is_only_assumed_is_no_hit(api):
    await api.register("prefill-0")
    api.index.assume(0, hash_blocks(TOKENS, BLOCK, namespace=namespace("deepseek")), until_s=100.0)
    assert (await api.query(TOKENS))["default"]["prefill-0"] == answer(0)


async def test_hashes_follow_the_documented_standard(api):
    """local = XXH3(tokens, S), seq[0] = local, seq[i] = XXH3(seq[i-1] || local[i], S): by another library."""
    await api.register("prefill-0", modelname="m", tenant_id="t")
    names = [xxhash.xxh3_64_intdigest(name) for name in (b"m", b"t")]
    seed = xxhash.xxh3_64_intdigest(b"".join(w.to_bytes(8, "little") for w in (names[0], 0, names[1], 0)))
    chain: list[int] = []
    for at in range(0, len(TOKENS), BLOCK):
        local = xxhash.xxh3_64_intdigest(TOKENS[at : at + BLOCK].astype("<u4").tobytes(), seed)
        both = chain[-1].to_bytes(8, "little") + local.to_bytes(8, "little") if chain else b""
        chain.append(xxhash.xxh3_64_intdigest(both, seed) if chain else local)
    assert max(chain) > 1 << 63, "one of them must need all 64 bits"
    api.index.store(0, Medium.GPU, np.array(chain[:6], np.uint64))
    assert await api.query(TOKENS, model="m", tenant_id="t") == {"t": {"prefill-0": answer(6 * BLOCK, 6 * BLOCK)}}
    for field in ("seq_hashes", "block_hash", "block_hashes"):
        for given in (chain, [str(word) for word in chain]):
            body = {"model": "m", "tenant_id": "t", "block_size": BLOCK, field: given}
            assert await api.post("/query_by_hash", body) == {"t": {"prefill-0": answer(6 * BLOCK, 6 * BLOCK)}}
    changed = [*chain[:3], chain[3] ^ 1, *chain[4:]]  # the lowest bit counts
    body = {"model": "m", "tenant_id": "t", "block_size": BLOCK, "seq_hashes": changed}
    assert (await api.post("/query_by_hash", body))["t"]["prefill-0"]["longest_matched"] == 3 * BLOCK


async def test_msgpack_as_the_example_proxy_speaks_it(api):
    async def post(path, body):
        headers = {"Content-Type": "application/msgpack"}
        async with api.session.post(api.url + path, data=msgpack.packb(body), headers=headers) as response:
            assert response.status == 200, await response.text()
            return msgpack.unpackb(await response.read())

    registration = {
        "endpoint": "tcp://127.0.0.1:20001",
        "type": "vLLM",
        "modelname": "deepseek",
        "instance_id": "prefill-0",
        "block_size": BLOCK,
        "dp_rank": 0,
        "tenant_id": "default",
        "lora_name": "",
        "hash_profile": {"strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": "0"},
    }
    assert await post("/register", registration) == {
        "status": "registered successfully",
        "instance_id": "prefill-0",
    }
    api.store("prefill-0", Medium.CPU, TOKENS)
    question = {"model": "deepseek", "block_size": BLOCK, "tenant_id": "default", "lora_name": "", "cache_salt": None}
    for given in (TOKENS.astype("<i4").tobytes(), TOKENS.tolist()):
        found = await post("/query", question | {"token_ids": given})
        match = {"longest_matched": 160, "gpu": 0, "cpu": 160, "disk": 0, "dp": {"0": 160}}
        assert found == {"instances": {"prefill-0": match | {"rank_matches": {"0": {"gpu": 0, "cpu": 160, "disk": 0}}}}}
    hashes = hash_blocks(TOKENS, BLOCK, namespace=namespace("deepseek"))
    for given in (hashes.astype("<u8").tobytes(), hashes.tolist()):
        found = await post("/query_by_hash", question | {"seq_hashes": given})
        assert found["instances"]["prefill-0"]["longest_matched"] == 160


# --- namespaces and tenants ------------------------------------------------------------------------------------------


async def test_tenants_models_and_salts_do_not_meet(api):
    await api.register("a")
    await api.register("b", tenant_id="blue")
    await api.register("c", modelname="qwen")
    await api.register("d", additionalsalt="w8a8")
    for worker, names in (
        ("a", {}),
        ("b", {"tenant": "blue"}),
        ("c", {"model": "qwen"}),
        ("d", {"salt": "w8a8"}),
    ):
        api.store(worker, Medium.GPU, TOKENS, **names)
    hit = answer(160, 160)
    assert await api.query(TOKENS) == {"default": {"a": hit}}
    assert await api.query(TOKENS, tenant_id="blue") == {"blue": {"b": hit}}
    assert await api.query(TOKENS, tenant_id="red") == {"red": {}}
    assert await api.query(TOKENS, model="qwen") == {"default": {"c": hit}}
    assert await api.query(TOKENS, additional_salt="w8a8") == {"default": {"d": hit}}
    assert await api.query(TOKENS, cache_salt="w8a8") == {"default": {"a": answer(0), "d": hit}}
    for tenant, seen in (("default", {"a", "d"}), ("blue", {"b"})):
        hashes = [int(h) for h in hash_blocks(TOKENS, BLOCK, namespace=namespace("deepseek", tenant="blue"))]
        body = {"model": "deepseek", "tenant_id": tenant, "block_size": BLOCK, "seq_hashes": hashes}
        found = (await api.post("/query_by_hash", body))[tenant]
        assert set(found) == seen
        assert (found["b"]["longest_matched"] == 160) if tenant == "blue" else not found["a"]["longest_matched"]


async def test_adapters_and_cache_salts_of_requests(api):
    await api.register("prefill-0")
    api.store("prefill-0", Medium.GPU, TOKENS[:32], lora_name="sql")
    api.store("prefill-0", Medium.GPU, TOKENS[:48], lora_id=7)
    api.store("prefill-0", Medium.GPU, TOKENS[:64], cache_salt="mine")
    for fields, longest in (
        ({}, 0),
        ({"lora_name": "sql"}, 32),
        ({"lora_id": 7}, 48),
        ({"lora_id": -1}, 0),
        ({"lora_name": None, "lora_id": None}, 0),
        ({"cache_salt": "mine"}, 64),
        ({"cache_salt": "mine", "additionalsalt": ""}, 64),
        ({"cache_salt": "yours"}, 0),
    ):
        assert (await api.query(TOKENS, **fields))["default"]["prefill-0"]["longest_matched"] == longest, fields
    refusal = await api.query(TOKENS, lora_name="sql", lora_id=7, status=400)
    assert refusal == {"error": "lora_id: expected lora_name or lora_id, not both, found 7", "field": "lora_id"}


async def test_a_number_of_an_adapter_registers_its_stream(api):
    await api.register("prefill-0", lora_id=7)
    worker = next(w for w in api.conductor.workers if w.id == "prefill-0")
    assert stream_of(worker).namespace == namespace("deepseek", lora_id=7)
    await api.register("prefill-0", lora_name="sql", additionalsalt="s", tenant_id="default")
    worker = next(w for w in api.conductor.workers if w.id == "prefill-0")
    assert stream_of(worker).namespace == namespace("deepseek", "sql", salt="s")


# --- registrations ---------------------------------------------------------------------------------------------------


async def test_a_worker_of_the_cluster_file_is_attached_and_detached(api):
    before = next(w for w in api.conductor.workers if w.id == "prefill-1")
    done = await api.register("prefill-1", endpoint="tcp://127.0.0.1:20001", replay_endpoint="tcp://127.0.0.1:20002")
    assert done == {"status": "registered successfully", "instance_id": "prefill-1"}
    worker = next(w for w in api.conductor.workers if w.id == "prefill-1")
    assert (worker.role, worker.address, worker.labels["rack"]) == (Role.PREFILL, "127.0.0.1:8101", "b")
    assert (worker.kv_events, worker.kv_replay) == ("tcp://127.0.0.1:20001", "tcp://127.0.0.1:20002")
    assert api.around.subscribers["prefill-1"].endpoint == "tcp://127.0.0.1:20001"
    api.store("prefill-1", Medium.GPU, TOKENS)
    assert len(api.conductor.workers) == 3
    body = {"instance_id": "prefill-1", "dp_rank": 0}
    done = await api.post("/unregister", body)
    assert done == {"status": "unregistered successfully", "removed_instances": ["prefill-1|default|0"]}
    assert next(w for w in api.conductor.workers if w.id == "prefill-1") == before
    assert api.index.resident(api.where("prefill-1"), Medium.GPU) == 0
    assert await api.query(TOKENS) == {"default": {}}
    refusal = await api.post("/unregister", body, 404)
    assert refusal["error"] == "instance_id: 'prefill-1|default|0' is not registered"


async def test_a_new_instance_becomes_a_prefill_worker_and_goes_again(api):
    await api.register("new", rank=3, type="SGLang", address="127.0.0.1:8300")
    await api.register("new", rank=0, type="SGLang")
    names = [worker.id for worker in api.conductor.state.prefills]
    assert names == ["prefill-0", "prefill-1", "new#dp3", "new"]
    worker = api.conductor.state.prefills[2]
    assert (worker.role, worker.dp_rank, worker.address) == (Role.PREFILL, 3, "127.0.0.1:8300")
    api.store("new", Medium.GPU, TOKENS)
    used = api.index.used
    assert used == 10
    body = {"type": "SGLang", "modelname": "deepseek", "instance_id": "new", "block_size": BLOCK, "dp_rank": 3}
    assert (await api.post("/unregister", body))["removed_instances"] == ["new|default|3"]
    assert (await api.query(TOKENS))["default"] == {"new": answer(160, 160)}
    await api.post("/unregister", body | {"dp_rank": 0, "lora_name": "x"})
    assert [worker.id for worker in api.conductor.state.prefills] == ["prefill-0", "prefill-1"]
    assert api.index.used == 0, "its residency goes with it"
    assert set(api.around.subscribers) == {"prefill-1"}, "the events of the cluster file's own are still followed"


async def test_registering_again_changes_nothing_and_a_new_endpoint_replaces(api):
    await api.register("prefill-0", endpoint="tcp://127.0.0.1:20001")
    await api.register("new", endpoint="tcp://127.0.0.1:20002")
    api.store("prefill-0", Medium.GPU, TOKENS)
    subscriber, workers = api.around.subscribers["prefill-0"], api.conductor.workers
    await api.register("prefill-0", endpoint="tcp://127.0.0.1:20001")
    assert api.conductor.workers == workers and api.around.subscribers["prefill-0"] is subscriber
    assert (await api.query(TOKENS))["default"]["prefill-0"]["longest_matched"] == 160
    await api.register("prefill-0", endpoint="tcp://127.0.0.1:20003")
    assert api.around.subscribers["prefill-0"].endpoint == "tcp://127.0.0.1:20003"
    assert (await api.query(TOKENS))["default"]["prefill-0"]["longest_matched"] == 0
    await api.register("prefill-0", endpoint="tcp://127.0.0.1:20003", modelname="qwen")
    assert api.around.subscribers["prefill-0"].stream.namespace == namespace("qwen"), "the same place, another meaning"
    taken = await api.register("prefill-0", endpoint="tcp://127.0.0.1:20002", status=400)
    assert taken["error"].startswith("endpoint: expected one of its own: worker 'new' has this")
    other = await api.register("prefill-0", endpoint="tcp://127.0.0.1:20004", tenant_id="blue", status=400)
    assert other["field"] == "tenant_id"
    await api.post("/unregister", {"instance_id": "prefill-0", "dp_rank": 0})
    assert next(w for w in api.conductor.workers if w.id == "prefill-0").labels == {"rack": "a"}


async def test_registrations_at_the_same_time(api):
    await asyncio.gather(
        *(api.register(f"i{k % 4}", rank=k // 4, endpoint=f"tcp://127.0.0.1:{21000 + k}") for k in range(12)),
        *(api.register("same", endpoint="tcp://127.0.0.1:22000") for _ in range(5)),
    )
    assert len(api.conductor.workers) == 3 + 12 + 1
    found = (await api.query(TOKENS))["default"]
    assert {name: sorted(match["DP"]) for name, match in found.items()} == {
        **{f"i{k}": ["0", "1", "2"] for k in range(4)},
        "same": ["0"],
    }


async def test_services_and_global_view(api):
    assert await api.get("/services") == {"count": 0, "services": []}
    assert await api.get("/global_view") == {"context_count": 0, "contexts": []}
    await api.register("prefill-0", endpoint="tcp://127.0.0.1:20001", replay_endpoint="tcp://h.example:5558")
    await api.register("prefill-0", rank=1, endpoint="tcp://[::1]:20002", type="mooncake")
    await api.register("new", tenant_id="blue", lora_name="sql", additionalsalt="w8a8")
    found = await api.get("/services")
    assert found["count"] == 3
    assert found["services"][0] | {"Synced": True} == {
        "Endpoint": "tcp://127.0.0.1:20001",
        "ReplayEndpoint": "tcp://h.example:5558",
        "Type": "vLLM",
        "ModelName": "deepseek",
        "LoraName": "",
        "TenantID": "default",
        "InstanceID": "prefill-0",
        "BlockSize": 16,
        "DPRank": 0,
        "AdditionalSalt": "",
        "CacheGroup": None,
        "LastSequence": -1,
        "Synced": True,
    }
    assert [(s["InstanceID"], s["DPRank"], s["Type"]) for s in found["services"]] == [
        ("prefill-0", 0, "vLLM"),
        ("prefill-0", 1, "Mooncake"),
        ("new", 0, "vLLM"),
    ]
    api.store("prefill-0", Medium.GPU, TOKENS)
    api.store("prefill-0#dp1", Medium.CPU, TOKENS[:64])
    api.store("prefill-1", Medium.CPU, TOKENS + 5)  # not registered
    api.store("new", Medium.DISK, TOKENS[:32], tenant="blue", lora_name="sql", salt="w8a8")
    view = await api.get("/global_view")
    base = {"model_name": "deepseek", "block_size": 16}
    assert view == {
        "context_count": 2,
        "contexts": [
            base
            | {"lora_name": "", "additional_salt": "", "tenant_id": "default", "prefix_count": 10}
            | {"instances": {"prefill-0": [0, 1]}},
            base
            | {"lora_name": "sql", "additional_salt": "w8a8", "tenant_id": "blue", "prefix_count": 2}
            | {"instances": {"new": [0]}},
        ],
    }


def test_labels_in_a_cluster_file_are_a_registration(tmp_path):
    file = tmp_path / "live.yaml"
    text = CLUSTER.replace("labels: {rack: b}", "labels: {kv_model: qwen, kv_instance: big}, dp_rank: 1")
    file.write_text(text.replace("labels: {rack: a}", "labels: {kv_model: qwen}"))
    without_events, worker, _ = load_live_cluster(file).workers
    assert service_of(without_events) is None
    service = service_of(worker)
    assert service is not None and (service.key, service.model, service.publisher) == ("big|default|1", "qwen", "vLLM")
    assert stream_of(worker).namespace == namespace("qwen")


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"block_size": 64}, ["block_size", "16", "64"]),
        ({"block_size": "16"}, ["block_size", "int", "str"]),
        ({"block_size": True}, ["block_size", "int", "bool"]),
        ({"block_size": 0}, ["block_size", ">= 1"]),
        ({"block_size": 1 << 80}, ["block_size"]),
        ({"dp_rank": -1}, ["dp_rank", ">= 0"]),
        ({"dp_rank": None}, ["dp_rank", "int", "null"]),
        ({"type": "Dynamo"}, ["type", "vLLM, SGLang or Mooncake", "Dynamo"]),
        ({"type": ""}, ["type", "nothing"]),
        ({"modelname": ""}, ["modelname", "name"]),
        ({"modelname": "a", "model": "b"}, ["modelname", "b"]),
        ({"instance_id": ""}, ["instance_id", "nothing"]),
        ({"instance_id": "x#dp1"}, ["instance_id", "#dp"]),
        ({"instance_id": "x" * 200}, ["instance_id", "128"]),
        ({"instance_id": "x" * 2000}, ["instance_id", "1024"]),
        ({"instance_id": "decode-0"}, ["instance_id", "prefills", "decode-0"]),
        ({"tenant_id": 3}, ["tenant_id", "str", "int"]),
        ({"cache_group": 1}, ["cache_group", "0"]),
        ({"address": "nowhere"}, ["address", "host:port"]),
        ({"replay_endpoint": "ipc:///tmp/x"}, ["replay_endpoint", "tcp://HOST:PORT"]),
        ({"colour": "red"}, ["colour", "no such field", "endpoint"]),
    ],
)
async def test_a_wrong_registration_is_told_by_field(api, fields, named):
    answer = await api.register(**{"instance": "new"} | fields, status=400)
    assert answer["error"].startswith(named[0]) and answer["field"] == named[0]
    for word in named:
        assert word in answer["error"], answer
    assert len(api.conductor.workers) == 3


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:5557",
        "tcp://*:5557",
        "tcp://0.0.0.0:5557",
        "tcp://[::]:5557",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1:5557/x",
        "tcp://user@127.0.0.1:5557",
        "tcp://eth0;10.0.0.1:5557",
        "tcp://10.0.0.1:5557\n",
        "tcp://10.0.0.1:5557 ",
        "tcp://-x:1",
        "TCP://10.0.0.1:5557",
        "ipc:///var/run/docker.sock",
        "inproc://x",
        "udp://10.0.0.1:1",
        "http://169.254.169.254/latest",
        "tcp://\u0663:\u0661",
    ],
)
async def test_only_tcp_endpoints_of_a_host(api, endpoint):
    answer = await api.register("new", endpoint=endpoint, status=400)
    assert answer["error"].startswith("endpoint: expected tcp://HOST:PORT")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "the body"),
        (b"{", "the body"),
        (b"[]", "the body: expected object, found array"),
        (b"\xff\xfe", "the body"),
        (b'{"model": "\\ud800"}', "the body"),
        (b'{"model": "m"}', "block_size: required"),
        (b'{"block_size": 16, "token_ids": []}', "model: expected the model's name, found nothing"),
        (b'{"model": "m", "block_size": 16}', "token_ids: expected an array of integers in 0 .. 4294967295"),
        (b'{"model": "m", "block_size": 8, "token_ids": []}', "block_size: expected 16, which the cluster's"),
        (b'{"model": "m", "block_size": 16, "token_ids": null}', "token_ids: expected an array"),
        (b'{"model": "m", "block_size": 16, "token_ids": {"0": 1}}', "token_ids: expected an array"),
        (b'{"model": "m", "block_size": 16, "token_ids": [1, 2.0]}', "token_ids[1]: expected an integer in 0"),
        (b'{"model": "m", "block_size": 16, "token_ids": [1,\n -7 ]}', "token_ids[1]: expected an integer in 0"),
        (b'{"model": "m", "block_size": 16, "token_ids": [true]}', "token_ids[0]"),
        (b'{"model": "m", "block_size": 16, "token_ids": ["1"]}', "token_ids[0]"),
        (b'{"model": "m", "block_size": 16, "token_ids": [[1]]}', "token_ids[0]"),
        (b'{"model": "m", "block_size": 16, "token_ids": [1,4294967296]}', "token_ids[1]: expected an integer in 0"),
        (b'{"model": "m", "block_size": 16, "token_ids": [1e3]}', "token_ids[0]"),
        (b'{"model": "m", "block_size": 16, "token_ids": [], "token": []}', "token: no such field"),
    ],
)
async def test_a_wrong_query_is_told_by_field(api, body, named):
    answer = await api.post("/query", body, 400)
    assert answer["error"].startswith(named), answer


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"seq_hashes": [1 << 64]}, "seq_hashes[0]: expected an integer in 0 .. 18446744073709551615"),
        ({"seq_hashes": [-1]}, "seq_hashes[0]"),
        ({"seq_hashes": [5, "0x12"]}, "seq_hashes[1]"),
        ({"block_hash": [5, ""]}, "block_hash[1]"),
        ({"block_hash": [5], "seq_hashes": [5]}, "seq_hashes: expected one array"),
        ({}, "seq_hashes: expected an array"),
    ],
)
async def test_wrong_hashes_are_told_by_element(api, given, named):
    answer = await api.post("/query_by_hash", {"model": "m", "block_size": BLOCK} | given, 400)
    assert answer["error"].startswith(named), answer


async def test_unknown_routes_wrong_methods_and_bodies_too_large(api, monkeypatch):
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/query", 405), ("POST", "/services", 405)):
        async with api.session.request(method, api.url + path) as response:
            assert response.status == status
    answer = await api.post("/register", b" " * (1 << 17), 413)
    assert answer == {"error": "the body: expected at most 65536 bytes"}

    async def endless():
        while True:
            yield b" " * (1 << 20)

    for data in (endless(), b" " * (LARGEST_BODY + 1)):
        try:
            async with api.session.post(api.url + "/query", data=data) as response:
                assert response.status == 413
                assert await response.json() == {"error": f"the body: expected at most {LARGEST_BODY} bytes"}
        except aiohttp.ClientError:
            pass  # it hung up while we were still sending


FIELDS = {
    "/register": {
        "endpoint": "tcp://127.0.0.1:20001",
        "replay_endpoint": "",
        "type": "vLLM",
        "modelname": "deepseek",
        "lora_name": None,
        "tenant_id": "default",
        "instance_id": "decode-0",
        "block_size": BLOCK,
        "dp_rank": 0,
        "additionalsalt": "",
    },
    "/unregister": {"instance_id": "prefill-0", "dp_rank": 0, "tenant_id": "default", "type": "vLLM"},
    "/query": {"model": "deepseek", "token_ids": [1, 2, 3] * 10, "block_size": BLOCK, "cache_salt": "x"},
    "/query_by_hash": {"model": "deepseek", "seq_hashes": [1, "2", 1 << 63], "block_size": BLOCK},
}
ODD = [None, True, -1, 1.5, 1e400, "", "\x00", "ü" * 50, [], {}, [[]], {"a": [None]}, 1 << 70, "9" * 30, [1, "a"], [-1]]


def mutated(rng: random.Random, path: str) -> tuple[bytes, str]:
    body = dict(FIELDS[path])
    for _ in range(rng.randint(0, 3)):
        name = rng.choice([*body, *FIELDS["/register"], "lora_id", "block_hash", "model", "salt"])
        if rng.random() < 0.25:
            body.pop(name, None)
        else:
            body[name] = rng.choice(ODD)
    kind = "application/msgpack" if rng.random() < 0.3 else "application/json"
    try:
        data = msgpack.packb(body) if kind.endswith("pack") else json.dumps(body).encode()
    except OverflowError:
        data, kind = json.dumps(body).encode(), "application/json"
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        at = rng.randrange(len(data))
        data = (
            rng.choice([data[:at], data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :], data + data[at:]]) or b"{"
        )
    return data, kind


async def test_a_thousand_broken_bodies_are_the_callers_fault(api):
    await api.register("prefill-0", endpoint="tcp://127.0.0.1:20009")
    rng = random.Random(7)
    seen: dict[int, int] = {}
    for i in range(1000):
        path = list(FIELDS)[i % 4]
        data, kind = mutated(rng, path)
        async with api.session.post(api.url + path, data=data, headers={"Content-Type": kind}) as response:
            text = await response.read()
            assert response.status in (200, 400, 404), (response.status, path, data, text)
            if response.status != 200:
                assert json.loads(text)["error"], (path, data)
            seen[response.status] = seen.get(response.status, 0) + 1
    assert seen[400] > 300 and seen[200] > 50, seen
    async with api.session.post(
        api.url + "/query", data=b"not gzip", headers={"Content-Encoding": "gzip"}, skip_auto_headers=["Content-Type"]
    ) as response:
        assert response.status == 400


# --- kernels against plain Python ------------------------------------------------------------------------------------


def test_matches_and_counts_against_a_plain_reading():
    rng = np.random.default_rng(5)
    for instances in (1, 15, 16, 17, 40):
        words = -(-instances // 16)
        index = PrefixIndex(np.zeros((256, words), np.int64), BLOCK, instances=instances)
        hashes = rng.integers(1, 1 << 63, 24).astype(np.uint64)
        has = np.zeros((3, instances, 24), bool)
        for p in range(instances):
            for medium in range(3):
                held = rng.random(24) < (0.9 if rng.random() < 0.7 else 0.2)
                held &= np.arange(24) < 20
                has[medium, p] = held
                for i in np.flatnonzero(held):
                    parent = int(hashes[i - 1]) if i else None
                    assert index.store(p, Medium(medium), hashes[i : i + 1], parent=parent) == 1
            index.assume(p, hashes[:22], until_s=9.0)
        numbers = index.find(hashes)
        assert len(numbers) == 22
        found = np.empty((instances, COLUMNS), np.int64)
        match_media(index._at, address(numbers), len(numbers), address(found))
        for p in range(instances):
            columns = [*has[:, p, :22], has[:, p, :22].any(axis=0)]
            assert found[p].tolist() == [int(np.argmin([*c, False])) for c in columns]
            assert found[p, ANY] >= found[p].max()
        groups = np.array([p % 3 - 1 for p in range(instances)], np.int64)
        seen, counts = np.full(2, -1, np.int64), np.zeros(2, np.int64)
        count_blocks(index._at, address(groups), 2, address(seen), address(counts))
        for g in range(2):
            assert counts[g] == has.any(axis=0)[groups == g].any(axis=0).sum()


def scanned(raw: bytes, most: int, quoted: bool, room: int = 0) -> list[int] | int:
    room = room or raw.count(b",") + 1
    words = np.empty(room, np.uint32 if most < 1 << 32 else np.uint64)
    data = np.frombuffer(raw or b" ", np.uint8)
    count = scan_integers(address(data), len(raw), signed(most), int(quoted), address(words), room)
    return words[:count].tolist() if count >= 0 else int(count)


def test_integers_of_json_arrays():
    rng = random.Random(3)
    for _ in range(2000):
        limit = rng.choice([1 << 32, 1 << 64])
        numbers = [rng.choice([rng.randrange(limit), rng.randrange(300), limit - 1]) for _ in range(rng.randrange(8))]
        quoted = limit > 1 << 32
        given = [str(n) if quoted and rng.random() < 0.3 else n for n in numbers]
        raw = json.dumps(given, indent=rng.choice([None, 0, 2]), separators=rng.choice([None, (",", ":")])).encode()
        assert scanned(raw, limit - 1, quoted) == numbers
        cut = raw[: rng.randrange(len(raw))]
        assert scanned(cut, limit - 1, quoted) < 0 or cut.endswith(b"]")
        where = rng.randrange(len(numbers) + 1)
        for bad in (limit, -1, 1.0, True, None, "", "x", [1], {}, 10**25, str(limit)):
            wrong = json.dumps([*given[:where], bad, *given[where:]]).encode()
            assert scanned(wrong, limit - 1, quoted) == -1 - where, wrong
    for raw in (b"", b" ", b"{}", b"null", b"1", b'"1"'):
        assert scanned(raw, 255, False) == NO_ARRAY
    assert scanned(b"[0, 10, 007]", 255, False) == -3
    assert scanned(b'[0, "007"]', 255, True) == [0, 7]


def test_long_json_arrays_are_read_in_two_places():
    """Of which the second may be beyond the array, or beyond what is wrong with it."""
    rng = random.Random(4)
    most = (1 << 32) - 1
    for _ in range(300):
        digits = rng.choice([1, 5, 6, 7, 10])
        numbers = [rng.randrange(min(10**digits, most)) for _ in range(rng.randrange(200, 800))]
        given = rng.choice([",", ", "]).join(map(str, numbers))
        if rng.random() < 0.5:  # spaces of all kinds
            given = "".join(f"{n}{rng.choice([',', ', ', ' ,', ',  '])}" for n in numbers).rstrip(", ")
        after = rng.choice(["", "", ', "text": "' + ", ".join(["12345"] * rng.randrange(1000)) + '"'])
        raw = f"[{given}]{after}".encode()
        room = len(raw) // 2
        assert scanned(raw, most, False, room) == numbers
        where = rng.randrange(len(numbers))
        for bad in ("-1", "1.5", "007", "", "x", '"1"', str(1 << 32), "1 2"):
            wrong = ", ".join([*map(str, numbers[:where]), bad, *map(str, numbers[where:])])
            assert scanned(f"[{wrong}]{after}".encode(), most, False, room + 20) == -1 - where, bad
        cut = raw[: rng.randrange(len(given))]
        assert scanned(cut, most, False, room) < 0


# --- the whole way ---------------------------------------------------------------------------------------------------


class Publisher:
    """A PUB socket that speaks vLLM's msgpack."""

    def __init__(self) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.sequence = 0

    async def send(self, *events, rank: int = 0) -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), rank])
        await self.socket.send_multipart([b"kv-events", self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1

    async def stored(self, tokens, hashes, parent=None, medium="GPU", lora_name=None, **options) -> None:
        ids = np.asarray(tokens).tolist()
        await self.send(["BlockStored", list(hashes), parent, ids, BLOCK, None, medium, lora_name], **options)


async def until(condition, what: str, seconds: float = 30.0) -> None:
    end_s = time.monotonic() + seconds
    while True:
        if await condition():
            return
        assert time.monotonic() < end_s, what
        await asyncio.sleep(0.02)


async def test_events_of_a_registration_are_found_by_queries(api):
    publishers = [Publisher(), Publisher()]
    for rank, publisher in enumerate(publishers):
        fields = {"tenant_id": "blue", "additionalsalt": "w8a8"}
        await api.register("engine", rank=rank, endpoint=publisher.endpoint, **fields)

    async def longest(**fields) -> dict:
        fields = {"tenant_id": "blue", "cache_salt": "w8a8"} | fields
        return (await api.query(TOKENS, **fields))[fields["tenant_id"]]

    async def published() -> bool:  # a subscription takes its time; what was published before it is lost
        await publishers[0].stored(TOKENS[:32], [11, 12])
        await publishers[1].stored(TOKENS[:16], [11], medium="CPU")
        return (await longest())["engine"]["DP"] == {"0": 32, "1": 16}

    await until(published, "the events were not heard")
    await publishers[0].stored(TOKENS[32:64], [13, 14], 12, medium="CPU")
    await publishers[0].stored(TOKENS[:48], [21, 22, 23], lora_name="sql")

    async def more() -> bool:
        return (await longest(lora_name="sql"))["engine"]["longest_matched"] == 48

    await until(more, "the later events were not heard")
    assert (await longest())["engine"] == answer(64, 32, 16, 0, **{"0": 64, "1": 16})
    assert await longest(tenant_id="default") == {}
    assert await longest(cache_salt="") == {}
    services = (await api.get("/services"))["services"]
    assert [s["Synced"] for s in services] == [True, True]
    assert services[0]["LastSequence"] == publishers[0].sequence - 1
    await publishers[0].send(["BlockRemoved", [12], "GPU"])

    async def fewer() -> bool:
        return (await longest())["engine"]["DP"]["0"] == 16

    await until(fewer, "the removal was not heard")
    await api.post("/unregister", {"instance_id": "engine", "dp_rank": 0, "tenant_id": "blue"})
    assert (await longest())["engine"] == answer(16, 0, 16, 0, **{"1": 16})
    await publishers[0].stored(TOKENS[:32], [31, 32])
    await publishers[1].stored(TOKENS[16:32], [12], 11, medium="DISK")

    async def settled() -> bool:
        return (await longest())["engine"]["DP"] == {"1": 32}

    await until(settled, "rank 1 goes on")
    for publisher in publishers:
        publisher.socket.close(0)


async def test_the_sidecar_serves_it(tmp_path):
    file = tmp_path / "live.yaml"
    file.write_text(CLUSTER.replace(', kv_events: "tcp://127.0.0.1:9"', ""))
    sidecar = Sidecar(Options("conductor", str(file), grpc="127.0.0.1:0", indexer="127.0.0.1:0", blocks=1 << 12))
    await sidecar.start()
    publisher = Publisher()
    try:
        async with aiohttp.ClientSession() as session:
            api = Served(sidecar, f"http://{sidecar.bound['indexer']}", session)
            await api.register("prefill-1", endpoint=publisher.endpoint)

            async def heard() -> bool:
                await publisher.stored(TOKENS[:48], [1, 2, 3])
                return (await api.query(TOKENS))["default"]["prefill-1"] == answer(48, 48)

            await until(heard, "the events were not heard")
            await api.register("prefill-1", endpoint=publisher.endpoint, modelname="qwen")  # the same stream, anew
            assert (await api.query(TOKENS)) == {"default": {}}

            async def heard_anew() -> bool:
                await publisher.stored(TOKENS[:32], [1, 2])
                return (await api.query(TOKENS, model="qwen"))["default"]["prefill-1"] == answer(32, 32)

            await until(heard_anew, "the events were not heard in their new namespace")
            await api.post("/unregister", {"instance_id": "prefill-1", "dp_rank": 0})
            assert (await api.query(TOKENS, model="qwen")) == {"default": {}}
            assert sidecar.conductor.state.index.used == 0 and not sidecar.subscribers
    finally:
        publisher.socket.close(0)
        await sidecar.stop()


@pytest.mark.parametrize("form", ["json", "msgpack"])
async def test_a_prompt_of_128k_tokens(api, form, record_property):
    """8192 blocks, all there, on 20 instances. Time is reported, not judged."""
    tokens = np.random.default_rng(1).integers(0, 150_000, 1 << 17).astype(np.uint32)
    for k in range(18):
        await api.register(f"i{k}", endpoint=f"tcp://127.0.0.1:{free_port()}")
    await api.register("prefill-0", endpoint=f"tcp://127.0.0.1:{free_port()}")
    for worker in api.conductor.state.prefills:
        if worker.id != "prefill-1":
            api.store(worker.id, Medium.GPU, tokens)
    body = {"model": "deepseek", "block_size": BLOCK}
    if form == "json":
        data = json.dumps(body | {"token_ids": tokens.tolist()}).encode()
    else:
        data = msgpack.packb(body | {"token_ids": tokens.tobytes()})
    took_s = []
    for _ in range(30):
        began_s = time.perf_counter()
        async with api.session.post(
            api.url + "/query", data=data, headers={"Content-Type": f"application/{form}"}
        ) as response:
            text = await response.read()
        took_s.append(time.perf_counter() - began_s)
    found = json.loads(text)["default"] if form == "json" else msgpack.unpackb(text)["instances"]
    assert len(found) == 19 and all(match["longest_matched"] == 1 << 17 for match in found.values())
    least, median = min(took_s) * 1e3, sorted(took_s)[15] * 1e3
    record_property("milliseconds", f"{least:.2f} least, {median:.2f} median")
    print(f"\n128k tokens as {form}, 19 instances: {least:.2f} ms at least, {median:.2f} ms median, client included")
