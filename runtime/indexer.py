"""The HTTP API of Mooncake's Conductor indexer: register publishers of KV events, ask who has cached a prompt.

After kvcache-ai/Mooncake, docs/source/api-reference/http/conductor-indexer.md, on the index that decisions use. A body
may also be msgpack, as the example proxy sends it: token ids are then little-endian int32 in one binary string, and the
answer has the form of that proxy, {"instances": {...}}.

A registration is kept on the worker it makes or changes, in `Worker.labels`; `stream_of` says what they mean to the
worker's events. A cluster file may give a worker the same labels: it then counts as registered.

    instance_id I, dp_rank r   is worker I where that one has rank r, or there is none and r is 0; otherwise `I#dpR`
    modelname, lora_name, additionalsalt, tenant_id   are the namespace of what it publishes (runtime/block_hash.py)

A query's `cache_salt` is the salt of the registration where the two are equal; for instances registered without one it
is the request's own, an extra key of the first block. `additional_salt` in a query says the first one apart.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NoReturn, Protocol, TypeVar

import msgspec
import numpy as np
import orjson
from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError
from numpy.typing import NDArray
from pydantic import ValidationError

from envs.spec import SpecError

from .block_hash import LORA_ID_SEED, Hashes, Namespace, address, namespace, signed, xxh3_64
from .conductor import Conductor
from .kernel.index_match import ANY, COLUMNS, count_blocks, match_media
from .kernel.json_integers import NO_ARRAY, scan_integers
from .kv_events import StreamNamespace, stream_namespace
from .prefix_index import Medium, Numbers
from .workers import Engine, Role, Worker

log = logging.getLogger(__name__)

LARGEST_BODY = 64 << 20
LARGEST_REGISTRATION = 64 << 10
PUBLISHERS = {
    "vllm": ("vLLM", Engine.VLLM),
    "sglang": ("SGLang", Engine.SGLANG),
    "mooncake": ("Mooncake", Engine.MOONCAKE),
}
MODEL, LORA, LORA_ID, SALT, TENANT = "kv_model", "kv_lora", "kv_lora_id", "kv_salt", "kv_tenant"
INSTANCE, PUBLISHER, HERE = "kv_instance", "kv_publisher", "kv_registered"
ADDED, ATTACHED = "added", "attached"  # values of HERE: the worker was made here, or only its events were set here
LABELS = (MODEL, LORA, LORA_ID, SALT, TENANT, INSTANCE, PUBLISHER, HERE)

_MEDIA = (Medium.GPU, Medium.CPU, Medium.DISK)
_MSGPACK = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})
_ENDPOINT = re.compile(r"tcp://([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_RANKED = re.compile(r".*#dp[0-9]+", re.DOTALL)
_EVERYWHERE = frozenset({"0.0.0.0", "[::]", "[::0]"})
_AT = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)


class Indexed(Protocol):
    """What the API needs of the process around it."""

    @property
    def conductor(self) -> Conductor:
        """Whose workers and index these are."""

    def membership(self) -> None:
        """The workers have changed: follow the KV events of those there are (with `stream_of`), and no others."""

    def kv_cursor(self, worker_id: str) -> tuple[int, bool]:
        """Sequence number of the last batch of a worker's events, -1 for none; whether its stream is followed."""


@dataclass(frozen=True, slots=True)
class Service:
    """A registered publisher of KV events."""

    worker_id: str
    instance_id: str
    dp_rank: int
    tenant: str
    endpoint: str
    replay_endpoint: str
    publisher: str
    model: str
    lora_name: str
    lora_id: int | None
    salt: str

    @property
    def key(self) -> str:
        return f"{self.instance_id}|{self.tenant}|{self.dp_rank}"

    @property
    def labels(self) -> dict[str, str]:
        """What its worker is labelled with."""
        given = {
            MODEL: self.model,
            LORA: self.lora_name,
            LORA_ID: "" if self.lora_id is None else str(self.lora_id),
            SALT: self.salt,
            TENANT: self.tenant,
            INSTANCE: self.instance_id,
            PUBLISHER: self.publisher,
        }
        return {name: value for name, value in given.items() if value}


def service_of(worker: Worker) -> Service | None:
    """The registration a worker carries, if it does."""
    labels = worker.labels
    if not worker.kv_events or MODEL not in labels or worker.role == Role.DECODE:
        return None
    return Service(
        worker.id,
        labels.get(INSTANCE, worker.id),
        worker.dp_rank,
        labels.get(TENANT, "default"),
        worker.kv_events,
        worker.kv_replay,
        labels.get(PUBLISHER, PUBLISHERS[worker.engine.value][0]),
        labels[MODEL],
        labels.get(LORA, ""),
        _number(labels.get(LORA_ID, "")),
        labels.get(SALT, ""),
    )


def stream_of(worker: Worker) -> StreamNamespace:
    """The namespace of a worker's KV events, as it was registered; the base one where it was not."""
    labels = worker.labels
    model, lora, salt, tenant = (labels.get(name, "") for name in (MODEL, LORA, SALT, TENANT))
    stream = stream_namespace(model, lora, salt=salt, tenant=tenant)
    lora_id = _number(labels.get(LORA_ID, ""))
    if lora or lora_id is None:
        return stream
    of_id = xxh3_64(lora_id.to_bytes(8, "little", signed=True), LORA_ID_SEED)
    return replace(stream, lora=of_id, namespace=namespace(model, lora_id=lora_id, salt=salt, tenant=tenant))


def add_routes(sidecar: Indexed) -> Callable[[web.Application], None]:
    """What adds the routes of the API to an application."""
    indexer = _Indexer(sidecar)

    def add(app: web.Application) -> None:
        for path, handler in (
            ("/register", indexer.register),
            ("/unregister", indexer.unregister),
            ("/query", indexer.query),
            ("/query_by_hash", indexer.query_by_hash),
        ):
            app.router.add_post(path, _answering(handler))
        app.router.add_get("/services", _answering(indexer.services))
        app.router.add_get("/global_view", _answering(indexer.global_view))

    return add


# --- bodies ----------------------------------------------------------------------------------------------------------

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
BlockSize = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Word = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What all bodies may have. A field and its other names mean the same."""

    lora_name: Text | None = None
    lora_id: Word | None = None
    tenant_id: Text | None = None
    modelname: Text | None = None
    model: Text | None = None
    model_name: Text | None = None
    additionalsalt: Text | None = None
    additional_salt: Text | None = None


class _Registration(_Body, kw_only=True):
    endpoint: Text
    type: Text
    instance_id: Text
    block_size: BlockSize
    dp_rank: Rank
    replay_endpoint: Text | None = None
    address: Text | None = None  # host:port of the HTTP server of a new worker; not in the document
    cache_group: int | None = None
    hash_profile: dict[str, Any] | None = None  # of the engine's own hashes, which are not relied on


class _Deregistration(_Body, kw_only=True):
    instance_id: Text
    dp_rank: Rank
    type: Text | None = None
    block_size: int | None = None
    endpoint: Text | None = None
    replay_endpoint: Text | None = None


class _Query(_Body, kw_only=True):
    block_size: BlockSize
    instance_id: Text | None = None
    cache_salt: Text | None = None


class _ByTokens(_Query, kw_only=True):
    token_ids: msgspec.Raw = msgspec.Raw()


class _ByHashes(_Query, kw_only=True):
    seq_hashes: msgspec.Raw = msgspec.Raw()
    block_hash: msgspec.Raw = msgspec.Raw()
    block_hashes: msgspec.Raw = msgspec.Raw()


_ARRAYS = ("token_ids", "seq_hashes", "block_hash", "block_hashes")
Body = TypeVar("Body", bound=_Body)
Q = TypeVar("Q", _ByTokens, _ByHashes)
_DECODERS: dict[type[_Body], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (_Registration, _Deregistration, _ByTokens, _ByHashes)
}


class _Refused(Exception):
    """An answer other than 200: `error` names the field and what was expected."""

    def __init__(self, error: str, *, field: str = "", status: int = 400) -> None:
        super().__init__(error)
        self.field = field
        self.status = status


def _refuse(field: str, expected: str, found: Any = None) -> NoReturn:
    what = "nothing" if found is None or found == "" else repr(found)
    raise _Refused(f"{field}: expected {expected}, found {what if len(what) < 200 else what[:200] + '..'}", field=field)


Handler = Callable[[web.Request], Awaitable[web.Response]]


def _answering(handler: Handler) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        try:
            return await handler(request)
        except _Refused as refused:
            error = {"error": str(refused)} | ({"field": refused.field} if refused.field else {})
            return _json(error, refused.status)

    return answer


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value) + b"\n", status=status, content_type="application/json")


async def _read(request: web.Request, largest: int = LARGEST_REGISTRATION) -> bytes:
    """The body, unpacked; the application's own limit is for small ones."""
    parts: list[bytes] = []
    size = request.content_length or 0
    if size <= largest:
        size = 0
        try:
            async for part in request.content.iter_any():
                size += len(part)
                if size > largest:
                    break
                parts.append(part)
        except (web.RequestPayloadError, PayloadEncodingError) as error:  # broken chunks, or it does not unpack
            raise _Refused(f"the body cannot be read: {error}") from None
    if size > largest:
        raise _Refused(f"the body: expected at most {largest} bytes", status=413)
    return b"".join(parts)


def _decoded(request: web.Request, body: bytes, kind: type[Body]) -> tuple[Body, dict[str, Any]]:
    """A body, and the arrays that came in msgpack."""
    try:
        if request.content_type not in _MSGPACK:
            made: Body = _DECODERS[kind].decode(body)
            return made, {}
        fields = msgspec.msgpack.decode(body)
        if not isinstance(fields, dict):
            raise msgspec.ValidationError(f"Expected `object`, got `{type(fields).__name__}`")
        arrays = {name: fields.pop(name) for name in _ARRAYS if name in fields and name in kind.__struct_fields__}
        return msgspec.convert(fields, kind), arrays
    except msgspec.ValidationError as error:
        raise _named(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Refused(f"the body: expected an object, in JSON or msgpack: {error}") from None


def _named(message: str, kind: type[_Body]) -> _Refused:
    """What is wrong with a body, in the form of our own messages."""
    found = _FIELD.fullmatch(message)
    if found:
        field = found[2]
        if found[1] == "missing required":
            return _Refused(f"{field}: required, found nothing", field=field)
        allowed = ", ".join(name for name in kind.__struct_fields__)
        return _Refused(f"{field}: no such field; expected {allowed}", field=field)
    at = _AT.fullmatch(message)
    what, field = (at[1], at[2]) if at else (message, "")
    what = what[:1].lower() + what[1:].replace("`", "").replace(", got ", ", found ")
    return _Refused(f"{field or 'the body'}: {what}", field=field)


def _same(given: Mapping[str, Any], what: str) -> Any:
    """The value of a field that has several names; None where it was not given."""
    said = {name: value for name, value in given.items() if value is not None}
    if len(set(said.values())) > 1:
        _refuse(next(iter(said)), f"{what} once, or the same under all its names", said)
    return next(iter(said.values()), None)


def _model(body: _Body, name: str) -> str:
    given = {"modelname": body.modelname, "model": body.model, "model_name": body.model_name}
    model: str | None = _same(given, "the model")
    return model or _refuse(name, "the model's name")


def _salt(body: _Body) -> str | None:
    given = {"additionalsalt": body.additionalsalt, "additional_salt": body.additional_salt}
    salt: str | None = _same(given, "the salt")
    return salt


def _adapter(body: _Body) -> tuple[str, int | None]:
    """Name and number of the LoRA adapter; a number below 1 is none."""
    lora_id = body.lora_id if body.lora_id is not None and body.lora_id > 0 else None
    if body.lora_name and lora_id is not None:
        _refuse("lora_id", "lora_name or lora_id, not both", body.lora_id)
    return body.lora_name or "", lora_id


def _number(label: str) -> int | None:
    return int(label) if label.isascii() and label.isdigit() and int(label) < 1 << 63 else None


def _integers(field: str, raw: bytes, most: int) -> Hashes:
    """Integers of a JSON array in 0 .. `most`; where that is the largest of 64 bits, decimal strings too."""
    expected = f"an array of integers in 0 .. {most}"
    if not raw:
        _refuse(field, expected)
    room = len(raw) // 2 + 1  # more than there can be; what is not written to takes no memory
    words = np.empty(room, np.uint32 if most < 1 << 32 else np.uint64)
    start = address(np.frombuffer(raw, np.uint8))
    count = scan_integers(start, len(raw), signed(most), int(most >= 1 << 63), address(words), room)
    if count == NO_ARRAY:
        _refuse(field, expected, _shown(raw))
    if count < 0:
        i = -1 - int(count)
        element = raw.split(b",", i + 1)[i]
        shown = _shown(element.strip(b" \t\r\n[") if i == 0 else element)
        raise _Refused(f"{field}[{i}]: expected an integer in 0 .. {most}, found {shown}", field=field)
    return words[:count].astype(np.uint64, copy=False)


def _packed_integers(field: str, given: Any, most: int) -> Hashes:
    """The same of msgpack: an array, or for token ids int32 in one binary string (which may be negative)."""
    if isinstance(given, bytes) and most < 1 << 32:
        if len(given) % 4:
            _refuse(field, "a multiple of 4 bytes", len(given))
        return np.frombuffer(given, "<u4").astype(np.uint64)
    if isinstance(given, bytes):
        if len(given) % 8:
            _refuse(field, "a multiple of 8 bytes", len(given))
        return np.frombuffer(given, "<u8").astype(np.uint64)
    if not isinstance(given, list):
        _refuse(field, f"an array of integers in 0 .. {most}", type(given).__name__)
    try:
        return _integers(field, orjson.dumps(given), most)
    except orjson.JSONEncodeError:
        _refuse(field, f"an array of integers in 0 .. {most}", "something else in it")


def _shown(raw: bytes) -> str:
    text = raw[:41].decode(errors="replace").strip()
    return (text if len(text) <= 40 else text[:40] + "..").removesuffix("]") or "nothing"


def _checked_endpoint(field: str, value: str) -> str:
    found = _ENDPOINT.fullmatch(value)
    if found is None or not 0 < int(found[3]) < 65536 or found[1] in _EVERYWHERE:
        _refuse(field, "tcp://HOST:PORT, where the publisher can be reached", value)
    return value


# --- the API ---------------------------------------------------------------------------------------------------------


class _Indexer:
    """Handlers. Registrations change one at a time; queries are answered without a turn for others in between."""

    def __init__(self, sidecar: Indexed) -> None:
        self.sidecar = sidecar
        self._changing = asyncio.Lock()
        self._before: dict[str, Worker] = {}  # workers of the cluster file as they were before a registration

    @property
    def conductor(self) -> Conductor:
        return self.sidecar.conductor

    def registered(self) -> list[Service]:
        found = (service_of(worker) for worker in self.conductor.workers)
        return [service for service in found if service is not None]

    # --- registrations ---

    async def register(self, request: web.Request) -> web.Response:
        body, _ = _decoded(request, await _read(request), _Registration)
        self._check_block_size(body.block_size)
        publisher, engine = PUBLISHERS.get(body.type.lower(), (None, None))
        if publisher is None or engine is None:
            _refuse("type", "vLLM, SGLang or Mooncake", body.type)
        if not body.instance_id or _RANKED.fullmatch(body.instance_id):
            _refuse("instance_id", "a name that does not end in #dp and a number", body.instance_id)
        if body.cache_group not in (None, 0):
            _refuse("cache_group", "0 or null", body.cache_group)
        endpoint = _checked_endpoint("endpoint", body.endpoint)
        replay = _checked_endpoint("replay_endpoint", body.replay_endpoint) if body.replay_endpoint else ""
        lora_name, lora_id = _adapter(body)
        service = Service(
            "",
            body.instance_id,
            body.dp_rank,
            body.tenant_id or "default",
            endpoint,
            replay,
            publisher,
            _model(body, "modelname"),
            lora_name,
            lora_id,
            _salt(body) or "",
        )
        async with self._changing:
            await self._enter(replace(service, worker_id=self._worker_id(service)), engine, body.address or "")
        return self._answer(request, {"status": "registered successfully", "instance_id": body.instance_id})

    def _worker_id(self, service: Service) -> str:
        whole = next((w for w in self.conductor.workers if w.id == service.instance_id), None)
        if service.dp_rank == (0 if whole is None else whole.dp_rank):
            return service.instance_id
        return f"{service.instance_id}#dp{service.dp_rank}"

    async def _enter(self, service: Service, engine: Engine, where: str) -> None:
        known = next((w for w in self.conductor.workers if w.id == service.worker_id), None)
        fields = {"kv_events": service.endpoint, "kv_replay": service.replay_endpoint}
        if where:
            fields["address"] = where
        if known is not None:
            if known.role == Role.DECODE:
                _refuse("instance_id", "an instance that prefills: the index is of these", service.instance_id)
            present = service_of(known)
            if present == service and where in ("", known.address):
                return
            if present is not None and present.tenant != service.tenant:
                _refuse(
                    "tenant_id", f"{present.tenant!r}, for which {service.worker_id!r} is registered", service.tenant
                )
        for worker in self.conductor.workers:
            if worker.kv_events == service.endpoint and worker.id != service.worker_id:
                _refuse("endpoint", f"one of its own: worker {worker.id!r} has this", service.endpoint)
        try:
            if known is None:
                labels = service.labels | {HERE: ADDED}
                new = Worker(
                    id=service.worker_id,
                    role=Role.PREFILL,
                    engine=engine,
                    dp_rank=service.dp_rank,
                    labels=labels,
                    **fields,  # type: ignore[arg-type]
                )
                await self._change(new)
            else:
                if HERE not in known.labels:
                    self._before[known.id] = known
                labels = _other(known.labels) | service.labels | {HERE: known.labels.get(HERE, ATTACHED)}
                changed = Worker.model_validate(known.model_dump() | fields | {"labels": labels})
                if known.kv_events:  # what it publishes from now on may mean something else: read it from the start
                    self.conductor.register(known.model_copy(update={"kv_events": "", "kv_replay": ""}))
                    self.sidecar.membership()
                await self._change(changed)
        except ValidationError as error:
            problem = error.errors()[0]
            name = {"id": "instance_id"}.get(str(problem["loc"][0]), str(problem["loc"][0])) if problem["loc"] else ""
            raise _Refused(f"{name}: {problem['msg'].removeprefix('Value error, ')}", field=name) from None
        except ValueError as error:  # SpecError too
            raise _Refused(f"instance_id: {service.instance_id!r} cannot be added: {error}") from None
        log.info("KV events of %r: from %s, tenant %r", service.worker_id, service.endpoint, service.tenant)

    async def _change(self, worker: Worker) -> None:
        """Put a worker in the place of the one of its id, if any, of which nothing is known to be cached any more."""
        new = self.conductor.register(worker)
        self.sidecar.membership()
        if not new:
            await asyncio.sleep(0)  # whoever followed its events before has stopped then
            where = self.conductor.state.prefill_of.get(worker.id)
            if where is not None:
                self.conductor.state.index.clear(where)

    async def unregister(self, request: web.Request) -> web.Response:
        body, _ = _decoded(request, await _read(request), _Deregistration)
        key = f"{body.instance_id}|{body.tenant_id or 'default'}|{body.dp_rank}"
        async with self._changing:
            service = next((s for s in self.registered() if s.key == key), None)
            if service is None:
                raise _Refused(f"instance_id: {key!r} is not registered", field="instance_id", status=404)
            worker = next(w for w in self.conductor.workers if w.id == service.worker_id)
            if worker.labels.get(HERE) == ADDED:
                try:
                    self.conductor.deregister(worker.id)
                except SpecError as error:
                    raise _Refused(f"instance_id: {key!r} cannot be removed: {error}", status=409) from None
                self.sidecar.membership()
            else:
                before = self._before.pop(worker.id, None)
                fields = {
                    "kv_events": before.kv_events if before else "",
                    "kv_replay": before.kv_replay if before else "",
                    "labels": before.labels if before else _other(worker.labels),
                }
                if fields["kv_events"]:
                    self.conductor.register(worker.model_copy(update={"kv_events": "", "kv_replay": ""}))
                    self.sidecar.membership()
                await self._change(worker.model_copy(update=fields))
        return self._answer(request, {"status": "unregistered successfully", "removed_instances": [key]})

    # --- queries ---

    async def query(self, request: web.Request) -> web.Response:
        body, arrays = await self._asked(request, _ByTokens)
        most = (1 << 32) - 1
        tokens = self._array("token_ids", {"token_ids": body.token_ids}, arrays, most).astype(np.uint32)
        model = _model(body, "model")
        lora_name, lora_id = _adapter(body)
        tenant, cache_salt, said = body.tenant_id or "default", body.cache_salt or "", _salt(body)
        index = self.conductor.state.index
        matches: dict[Namespace, NDArray[np.int64]] = {}
        found = []
        for service in self._visible(body, model, tenant):
            salt, extra = service.salt, cache_salt
            if said is None and salt == cache_salt:
                extra = ""
            elif salt != (said or ""):
                continue  # its hashes are of another namespace
            within = namespace(model, lora_name, lora_id=lora_id, salt=salt, tenant=tenant, cache_salt=extra)
            if within not in matches:
                matches[within] = self._match(index.find_tokens(tokens, within)[0])
            found.append((service, matches[within]))
        return self._matched(request, tenant, found)

    async def query_by_hash(self, request: web.Request) -> web.Response:
        body, arrays = await self._asked(request, _ByHashes)
        given = {"seq_hashes": body.seq_hashes, "block_hash": body.block_hash, "block_hashes": body.block_hashes}
        hashes = self._array("seq_hashes", given, arrays, (1 << 64) - 1)
        model = _model(body, "model")
        _adapter(body), _salt(body)  # the hashes say these already; wrong ones are told nonetheless
        tenant = body.tenant_id or "default"
        match = self._match(self.conductor.state.index.find(hashes))
        return self._matched(request, tenant, ((service, match) for service in self._visible(body, model, tenant)))

    async def _asked(self, request: web.Request, kind: type[Q]) -> tuple[Q, dict[str, Any]]:
        body, arrays = _decoded(request, await _read(request, LARGEST_BODY), kind)
        self._check_block_size(body.block_size)
        return body, arrays

    @staticmethod
    def _array(name: str, given: dict[str, msgspec.Raw], packed: dict[str, Any], most: int) -> Hashes:
        """The array among its names, in JSON or msgpack."""
        raws = {field: bytes(raw) for field, raw in given.items() if len(memoryview(raw))}
        if len(raws) + len(packed) > 1:
            _refuse(name, "one array, under one name", sorted(raws | packed))
        for field, value in packed.items():
            return _packed_integers(field, value, most)
        for field, raw in raws.items():
            return _integers(field, raw, most)
        return _integers(name, b"", most)

    def _visible(self, body: _Query, model: str, tenant: str) -> Iterable[Service]:
        for service in self.registered():
            if service.tenant == tenant and service.model == model and body.instance_id in (None, service.instance_id):
                yield service

    def _match(self, numbers: Numbers) -> NDArray[np.int64]:
        """Leading tokens of known blocks, by instance and medium, int64 [instances, COLUMNS]."""
        index = self.conductor.state.index
        found = np.empty((index.instances, COLUMNS), np.int64)
        match_media(index._at, address(numbers), len(numbers), address(found))
        found *= index.block_tokens
        return found

    def _matched(
        self, request: web.Request, tenant: str, found: Iterable[tuple[Service, NDArray[np.int64]]]
    ) -> web.Response:
        """The answer to a query: an instance has on a medium what its best rank has."""
        by_rank: dict[str, dict[str, list[int]]] = {}
        for service, match in found:
            row = match[self.conductor.state.prefill_of[service.worker_id]].tolist()
            by_rank.setdefault(service.instance_id, {})[str(service.dp_rank)] = row
        packed = request.content_type in _MSGPACK
        instances: dict[str, dict[str, Any]] = {}
        for instance_id, ranks in by_rank.items():
            best = [max(row[column] for row in ranks.values()) for column in range(COLUMNS)]
            of_media = {medium.name.lower() if packed else medium.name: best[medium] for medium in _MEDIA}
            of_ranks = {rank: row[ANY] for rank, row in ranks.items()}
            answer: dict[str, Any] = {"longest_matched": best[ANY]} | of_media
            if packed:
                media_of = {r: {medium.name.lower(): row[medium] for medium in _MEDIA} for r, row in ranks.items()}
                answer |= {"dp": of_ranks, "rank_matches": media_of}
            else:
                answer["DP"] = of_ranks
            instances[instance_id] = answer
        return self._answer(request, {"instances": instances} if packed else {tenant: instances})

    # --- views ---

    async def services(self, request: web.Request) -> web.Response:
        shown = []
        for service in self.registered():
            last, synced = self.sidecar.kv_cursor(service.worker_id)
            shown.append(
                {
                    "Endpoint": service.endpoint,
                    "ReplayEndpoint": service.replay_endpoint,
                    "Type": service.publisher,
                    "ModelName": service.model,
                    "LoraName": service.lora_name,
                    "TenantID": service.tenant,
                    "InstanceID": service.instance_id,
                    "BlockSize": self.conductor.state.block_tokens,
                    "DPRank": service.dp_rank,
                    "AdditionalSalt": service.salt,
                    "CacheGroup": None,
                    "LastSequence": last,
                    "Synced": synced,
                }
            )
        return _json({"count": len(shown), "services": shown})

    async def global_view(self, request: web.Request) -> web.Response:
        index, prefill_of = self.conductor.state.index, self.conductor.state.prefill_of
        contexts: dict[tuple[str, str, str, str], list[Service]] = {}
        for service in self.registered():
            contexts.setdefault((service.model, service.lora_name, service.salt, service.tenant), []).append(service)
        group_of = np.full(max(1, index.instances), -1, np.int64)
        for i, members in enumerate(contexts.values()):
            for service in members:
                group_of[prefill_of[service.worker_id]] = i
        seen = np.full(max(1, len(contexts)), -1, np.int64)
        counts = np.zeros_like(seen)
        count_blocks(index._at, address(group_of), len(contexts), address(seen), address(counts))
        shown = []
        for (model, lora, salt, tenant), blocks in zip(contexts, counts.tolist(), strict=False):
            instances: dict[str, list[int]] = {}
            for service in contexts[model, lora, salt, tenant]:
                instances.setdefault(service.instance_id, []).append(service.dp_rank)
            shown.append(
                {
                    "model_name": model,
                    "lora_name": lora,
                    "block_size": index.block_tokens,
                    "additional_salt": salt,
                    "tenant_id": tenant,
                    "prefix_count": blocks,
                    "instances": {name: sorted(ranks) for name, ranks in instances.items()},
                }
            )
        return _json({"context_count": len(shown), "contexts": shown})

    # --- both ---

    def _check_block_size(self, given: int) -> None:
        present = self.conductor.state.block_tokens
        if given != present:
            _refuse("block_size", f"{present}, which the cluster's block_tokens is", given)

    @staticmethod
    def _answer(request: web.Request, value: Any) -> web.Response:
        if request.content_type in _MSGPACK:
            return web.Response(body=msgspec.msgpack.encode(value), content_type="application/msgpack")
        return _json(value)


def _other(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels that say nothing of a registration."""
    return {name: value for name, value in labels.items() if name not in LABELS}
