from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOCAL: _ClassVar[Source]
    FETCH: _ClassVar[Source]
    RECOMPUTE: _ClassVar[Source]
LOCAL: Source
FETCH: Source
RECOMPUTE: Source

class ScheduleRequest(_message.Message):
    __slots__ = ("request_id", "tokens", "block_hashes", "input_tokens", "text_bytes", "lora_name", "cache_salt", "ttft_slo_s", "tbt_slo_s", "tenant", "priority", "candidates", "arrival_s", "lease_s", "unreported", "dry_run", "explain")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    UNREPORTED_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: bytes
    block_hashes: BlockHashes
    input_tokens: int
    text_bytes: int
    lora_name: str
    cache_salt: str
    ttft_slo_s: float
    tbt_slo_s: float
    tenant: str
    priority: int
    candidates: _containers.RepeatedScalarFieldContainer[str]
    arrival_s: float
    lease_s: float
    unreported: bool
    dry_run: bool
    explain: bool
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[bytes] = ..., block_hashes: _Optional[_Union[BlockHashes, _Mapping]] = ..., input_tokens: _Optional[int] = ..., text_bytes: _Optional[int] = ..., lora_name: _Optional[str] = ..., cache_salt: _Optional[str] = ..., ttft_slo_s: _Optional[float] = ..., tbt_slo_s: _Optional[float] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., candidates: _Optional[_Iterable[str]] = ..., arrival_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., unreported: _Optional[bool] = ..., dry_run: _Optional[bool] = ..., explain: _Optional[bool] = ...) -> None: ...

class BlockHashes(_message.Message):
    __slots__ = ("hashes", "input_tokens")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    input_tokens: int
    def __init__(self, hashes: _Optional[bytes] = ..., input_tokens: _Optional[int] = ...) -> None: ...

class ScheduleResponse(_message.Message):
    __slots__ = ("request_id", "assignment", "rejection", "policy", "fell_back", "explanation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FELL_BACK_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    assignment: Assignment
    rejection: Rejection
    policy: str
    fell_back: str
    explanation: Explanation
    def __init__(self, request_id: _Optional[str] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., policy: _Optional[str] = ..., fell_back: _Optional[str] = ..., explanation: _Optional[_Union[Explanation, _Mapping]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("id", "address")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    id: str
    address: str
    def __init__(self, id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Pair(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: Endpoint
    decode: Endpoint
    def __init__(self, prefill: _Optional[_Union[Endpoint, _Mapping]] = ..., decode: _Optional[_Union[Endpoint, _Mapping]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("prefill", "decode", "source", "holder", "fallbacks", "input_tokens", "reused_tokens", "predicted_ttft_s", "predicted_tbt_s", "lease_s")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TBT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    prefill: Endpoint
    decode: Endpoint
    source: Source
    holder: Endpoint
    fallbacks: _containers.RepeatedCompositeFieldContainer[Pair]
    input_tokens: int
    reused_tokens: int
    predicted_ttft_s: float
    predicted_tbt_s: float
    lease_s: float
    def __init__(self, prefill: _Optional[_Union[Endpoint, _Mapping]] = ..., decode: _Optional[_Union[Endpoint, _Mapping]] = ..., source: _Optional[_Union[Source, str]] = ..., holder: _Optional[_Union[Endpoint, _Mapping]] = ..., fallbacks: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ..., input_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., predicted_ttft_s: _Optional[float] = ..., predicted_tbt_s: _Optional[float] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("reason", "message", "retry_after_s", "predicted_ttft_s", "predicted_tbt_s", "http_status")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TBT_S_FIELD_NUMBER: _ClassVar[int]
    HTTP_STATUS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    retry_after_s: float
    predicted_ttft_s: float
    predicted_tbt_s: float
    http_status: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., predicted_ttft_s: _Optional[float] = ..., predicted_tbt_s: _Optional[float] = ..., http_status: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("events", "loads")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    loads: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("request_id", "at_s", "prefill_started", "prefill_done", "kv_ready", "first_token", "finished", "failed", "alive", "fetch_landed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STARTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DONE_FIELD_NUMBER: _ClassVar[int]
    KV_READY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    FETCH_LANDED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    at_s: float
    prefill_started: PrefillStarted
    prefill_done: PrefillDone
    kv_ready: KvReady
    first_token: FirstToken
    finished: Finished
    failed: Failed
    alive: Alive
    fetch_landed: FetchLanded
    def __init__(self, request_id: _Optional[str] = ..., at_s: _Optional[float] = ..., prefill_started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., prefill_done: _Optional[_Union[PrefillDone, _Mapping]] = ..., kv_ready: _Optional[_Union[KvReady, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., fetch_landed: _Optional[_Union[FetchLanded, _Mapping]] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("expected_end_s", "reused_tokens")
    EXPECTED_END_S_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    expected_end_s: float
    reused_tokens: int
    def __init__(self, expected_end_s: _Optional[float] = ..., reused_tokens: _Optional[int] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("prefill_s", "ttft_s", "reused_tokens")
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_s: float
    ttft_s: float
    reused_tokens: int
    def __init__(self, prefill_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., reused_tokens: _Optional[int] = ...) -> None: ...

class KvReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("stall_s",)
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    stall_s: float
    def __init__(self, stall_s: _Optional[float] = ...) -> None: ...

class FetchLanded(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Finished(_message.Message):
    __slots__ = ("output_tokens", "ttft_s", "tbt_s", "decode_s")
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TBT_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    output_tokens: int
    ttft_s: float
    tbt_s: float
    decode_s: float
    def __init__(self, output_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., tbt_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("stage", "message")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    message: str
    def __init__(self, stage: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("worker_id", "at_s", "prefill_end_s", "batch", "kv_tokens", "waiting", "tx_flows", "rx_flows", "tx_bytes_per_s", "rx_bytes_per_s", "tx_backlog_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_END_S_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TX_FLOWS_FIELD_NUMBER: _ClassVar[int]
    RX_FLOWS_FIELD_NUMBER: _ClassVar[int]
    TX_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RX_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TX_BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    at_s: float
    prefill_end_s: float
    batch: int
    kv_tokens: float
    waiting: int
    tx_flows: int
    rx_flows: int
    tx_bytes_per_s: float
    rx_bytes_per_s: float
    tx_backlog_bytes: float
    def __init__(self, worker_id: _Optional[str] = ..., at_s: _Optional[float] = ..., prefill_end_s: _Optional[float] = ..., batch: _Optional[int] = ..., kv_tokens: _Optional[float] = ..., waiting: _Optional[int] = ..., tx_flows: _Optional[int] = ..., rx_flows: _Optional[int] = ..., tx_bytes_per_s: _Optional[float] = ..., rx_bytes_per_s: _Optional[float] = ..., tx_backlog_bytes: _Optional[float] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: int
    def __init__(self, unknown: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("id", "role", "address", "engine", "kv_events", "kv_replay", "metrics", "bootstrap", "dp_rank", "connector")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    KV_REPLAY_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: str
    address: str
    engine: str
    kv_events: str
    kv_replay: str
    metrics: str
    bootstrap: str
    dp_rank: int
    connector: str
    def __init__(self, id: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., engine: _Optional[str] = ..., kv_events: _Optional[str] = ..., kv_replay: _Optional[str] = ..., metrics: _Optional[str] = ..., bootstrap: _Optional[str] = ..., dp_rank: _Optional[int] = ..., connector: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("added",)
    ADDED_FIELD_NUMBER: _ClassVar[int]
    added: bool
    def __init__(self, added: _Optional[bool] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: _Optional[bool] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("now_s", "policy", "cluster", "in_flight", "blocks", "workers")
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    now_s: float
    policy: str
    cluster: str
    in_flight: int
    blocks: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    def __init__(self, now_s: _Optional[float] = ..., policy: _Optional[str] = ..., cluster: _Optional[str] = ..., in_flight: _Optional[int] = ..., blocks: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("worker", "up", "note", "queue_s", "queue_requests", "host_blocks", "device_blocks", "batch", "kv_tokens", "pending_requests", "kv_sequence", "kv_synced")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KV_SYNCED_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    up: bool
    note: str
    queue_s: float
    queue_requests: int
    host_blocks: int
    device_blocks: int
    batch: int
    kv_tokens: float
    pending_requests: int
    kv_sequence: int
    kv_synced: bool
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., up: _Optional[bool] = ..., note: _Optional[str] = ..., queue_s: _Optional[float] = ..., queue_requests: _Optional[int] = ..., host_blocks: _Optional[int] = ..., device_blocks: _Optional[int] = ..., batch: _Optional[int] = ..., kv_tokens: _Optional[float] = ..., pending_requests: _Optional[int] = ..., kv_sequence: _Optional[int] = ..., kv_synced: _Optional[bool] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("request_id", "policy", "fell_back", "verdict", "prefills", "decodes", "prefill_load", "decode_load_now", "decode_load_forecast", "ttft_slo_s", "tbt_slo_s", "input_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FELL_BACK_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOAD_FIELD_NUMBER: _ClassVar[int]
    DECODE_LOAD_NOW_FIELD_NUMBER: _ClassVar[int]
    DECODE_LOAD_FORECAST_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    policy: str
    fell_back: str
    verdict: str
    prefills: _containers.RepeatedCompositeFieldContainer[PrefillView]
    decodes: _containers.RepeatedCompositeFieldContainer[DecodeView]
    prefill_load: float
    decode_load_now: float
    decode_load_forecast: float
    ttft_slo_s: float
    tbt_slo_s: float
    input_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., policy: _Optional[str] = ..., fell_back: _Optional[str] = ..., verdict: _Optional[str] = ..., prefills: _Optional[_Iterable[_Union[PrefillView, _Mapping]]] = ..., decodes: _Optional[_Iterable[_Union[DecodeView, _Mapping]]] = ..., prefill_load: _Optional[float] = ..., decode_load_now: _Optional[float] = ..., decode_load_forecast: _Optional[float] = ..., ttft_slo_s: _Optional[float] = ..., tbt_slo_s: _Optional[float] = ..., input_tokens: _Optional[int] = ...) -> None: ...

class PrefillView(_message.Message):
    __slots__ = ("id", "up", "chosen", "queue_s", "local_tokens", "fetch_tokens", "fetch_s", "ttft_local_s", "ttft_fetch_s", "ttft_recompute_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_LOCAL_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_FETCH_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_RECOMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    up: bool
    chosen: bool
    queue_s: float
    local_tokens: float
    fetch_tokens: float
    fetch_s: float
    ttft_local_s: float
    ttft_fetch_s: float
    ttft_recompute_s: float
    def __init__(self, id: _Optional[str] = ..., up: _Optional[bool] = ..., chosen: _Optional[bool] = ..., queue_s: _Optional[float] = ..., local_tokens: _Optional[float] = ..., fetch_tokens: _Optional[float] = ..., fetch_s: _Optional[float] = ..., ttft_local_s: _Optional[float] = ..., ttft_fetch_s: _Optional[float] = ..., ttft_recompute_s: _Optional[float] = ...) -> None: ...

class DecodeView(_message.Message):
    __slots__ = ("id", "up", "chosen", "batch", "kv_tokens", "free_tokens", "tbt_now_s", "tbt_assigned_s", "tbt_at_join_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TBT_NOW_S_FIELD_NUMBER: _ClassVar[int]
    TBT_ASSIGNED_S_FIELD_NUMBER: _ClassVar[int]
    TBT_AT_JOIN_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    up: bool
    chosen: bool
    batch: float
    kv_tokens: float
    free_tokens: float
    tbt_now_s: float
    tbt_assigned_s: float
    tbt_at_join_s: float
    def __init__(self, id: _Optional[str] = ..., up: _Optional[bool] = ..., chosen: _Optional[bool] = ..., batch: _Optional[float] = ..., kv_tokens: _Optional[float] = ..., free_tokens: _Optional[float] = ..., tbt_now_s: _Optional[float] = ..., tbt_assigned_s: _Optional[float] = ..., tbt_at_join_s: _Optional[float] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
