"""`ClusterSpec`: which nodes a cluster has and which SLOs it must meet; YAML in, arrays for the kernels out."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .hardware import Count, DecodeTimes, HardwareProfile, PositiveCount, PrefillTimes, profiles
from .state import (
    CLUSTER_PARAMETERS,
    COUPLED_CLUSTER,
    COUPLED_PARAMETERS,
    DECODE_PARAMETERS,
    PREFILL_PARAMETERS,
    EvictionRule,
    Parameters,
    Records,
)


class SpecError(ValueError):
    """A cluster description that cannot be; the message names file, field and what was expected."""


class Strict(BaseModel):
    """Fields that are known, and finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSize(Strict):
    """The served model, as far as its KV goes. Default: LLaMA2-70B (paper A3)."""

    layers: PositiveCount = 80
    kv_bytes_per_token: PositiveFloat = 327_680.0


class Slo(Strict):
    """What a request must meet to count as good."""

    ttft_s: PositiveFloat = 30.0
    tbt_s: PositiveFloat = 0.1
    tbt_tail_share: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="TBT = mean of the longest share of a request's intervals; 1 is the plain mean",
    )


class Nodes(Strict):
    """Equal nodes. Fields that are given override the hardware profile's."""

    count: int = Field(gt=0, le=4096)
    hardware: str | HardwareProfile = Field(description="a built-in profile's name, a YAML file, or a profile's fields")

    @field_validator("hardware", mode="before")
    @classmethod
    def _from_file(cls, hardware: Any, info: ValidationInfo) -> Any:
        """A file is looked for beside the cluster file, and becomes its fields: the spec does not change with it."""
        if not isinstance(hardware, str) or not hardware.endswith((".yaml", ".yml")):
            return hardware
        path = (info.context or {}).get("folder", Path()) / hardware
        try:
            return HardwareProfile.model_validate(yaml.safe_load(path.read_text()))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"hardware profile {path}: {error}") from None
        except ValidationError as error:
            wrong = error.errors()[0]
            field = ".".join(str(part) for part in wrong["loc"])
            raise ValueError(f"hardware profile {path}: {field}: {wrong['msg']}") from None

    @model_validator(mode="after")
    def _known_hardware(self) -> Nodes:
        if isinstance(self.hardware, str) and self.hardware not in profiles():
            raise ValueError(
                f"no hardware profile is called {self.hardware!r}; built in are {', '.join(sorted(profiles()))}, "
                "or give a profile's .yaml file or its fields here"
            )
        return self

    def _profile_with(self, given: dict[str, Any]) -> HardwareProfile:
        base = profiles()[self.hardware] if isinstance(self.hardware, str) else self.hardware
        return HardwareProfile.model_validate(base.model_dump() | given)


class Pool(Nodes):
    """Equal nodes of one pool. Fields that are given override the hardware profile's."""

    _times_of: ClassVar[str]

    nic_bytes_per_s: PositiveFloat | None = None

    @property
    def profile(self) -> HardwareProfile:
        """The hardware profile with this pool's own fields in place."""
        given = self.model_dump(exclude={"count", "hardware", "pipeline_nodes"}, exclude_none=True)
        if "times" in given:
            given[self._times_of] = given.pop("times")
        return self._profile_with(given)


class PrefillPool(Pool):
    """Prefill instances: nodes, or pipelined groups of nodes (docs/physics.md, "Pipelined groups")."""

    _times_of: ClassVar[str] = "prefill"
    pipeline_nodes: PositiveInt = Field(
        default=1,
        description="nodes of an instance, each of this hardware; `count` is that of instances. TTFT gains only where "
        "inputs have several chunks (times.chunk_tokens): a single one takes a group as long as a node",
    )
    times: PrefillTimes | None = None
    h2d_bytes_per_s: PositiveFloat | None = None
    device_kv_tokens: Count | None = None
    host_kv_tokens: Count | None = None
    disk_kv_tokens: Count | None = Field(
        default=None,
        description="KV a node keeps on disk that its host tier evicted; 0: none",
    )
    disk_bytes_per_s: PositiveFloat | None = Field(default=None, description="reading from disk, of each node")


class DecodePool(Pool):
    """Decode nodes."""

    _times_of: ClassVar[str] = "decode"
    times: DecodeTimes | None = None
    join_bytes_per_s: PositiveFloat | None = None
    decode_kv_tokens: PositiveCount | None = None
    max_batch: PositiveCount | None = None


class _Described(Strict):
    """A cluster as described."""

    @property
    def checksum(self) -> str:
        """Identifies the cluster in results."""
        return hashlib.sha256(self.model_dump_json(exclude={"name"}).encode()).hexdigest()[:16]


class ClusterSpec(_Described):
    """A prefill pool and a decode pool, each of one or more kinds of node."""

    name: str = "cluster"
    prefill: tuple[PrefillPool, ...] = Field(min_length=1)
    decode: tuple[DecodePool, ...] = Field(min_length=1)
    model: ModelSize = ModelSize()
    slo: Slo = Slo()
    block_tokens: PositiveCount = Field(default=512, description="tokens per KV block, that of the traces (paper A3)")
    transfer_latency_s: NonNegativeFloat = Field(default=0.02, description="fixed part of a KV transfer (paper E2)")
    decode_recheck: bool = Field(
        default=True, description="decode nodes check the TBT SLO again when the KV is there (A6.4)"
    )
    prior_output_tokens: PositiveFloat = Field(
        default=256.0, description="expected output before any request has finished"
    )
    prior_decode_s: PositiveFloat = Field(
        default=15.0, description="expected decode time before any request has finished"
    )
    decode_time_s: PositiveFloat | None = Field(
        default=None,
        description="t_d, how long every request is taken to decode ([A] 7.4); none: as long as they took lately",
    )
    rate_horizon_s: PositiveFloat = Field(default=30.0, description="time constant of moving rates")

    eviction: Literal["lru", "lfu", "length_aware"] = Field(
        default="lru", description="which cached blocks give way first (paper A3)"
    )

    @model_validator(mode="after")
    def _possible(self) -> ClusterSpec:
        for i, pool in enumerate(self.prefill):
            if pool.profile.device_kv_tokens > pool.profile.host_kv_tokens:
                raise ValueError(
                    f"prefill.{i}: device_kv_tokens ({pool.profile.device_kv_tokens}) is above host_kv_tokens "
                    f"({pool.profile.host_kv_tokens}); the device holds a part of what the host holds"
                )
            least = -(-self.block_tokens // pool.pipeline_nodes)
            disk, host = pool.profile.disk_kv_tokens, pool.profile.host_kv_tokens
            if 0 < disk < least or (disk > 0 and host < least):
                raise ValueError(
                    f"prefill.{i}: disk_kv_tokens ({disk}) and host_kv_tokens ({host}) must both hold a block of "
                    f"{self.block_tokens} tokens; the disk gets what the host tier evicts (0: no disk)"
                )
            if pool.pipeline_nodes > self.model.layers:
                raise ValueError(
                    f"prefill.{i}: pipeline_nodes ({pool.pipeline_nodes}) is above the model's layers "
                    f"({self.model.layers}); each node of a pipeline holds some of them"
                )
        return self

    @property
    def n_prefill(self) -> int:
        """Prefill instances P of all pools."""
        return sum(pool.count for pool in self.prefill)

    @property
    def n_decode(self) -> int:
        """Decode instances D of all pools."""
        return sum(pool.count for pool in self.decode)

    def parameters(self) -> Parameters:
        """The arrays the kernels read, one record per instance in the order of the pools."""
        cluster = np.zeros(1, CLUSTER_PARAMETERS)
        cluster[0] = (
            self.block_tokens,
            self.model.kv_bytes_per_token,
            self.model.layers,
            self.transfer_latency_s,
            self.slo.ttft_s,
            self.slo.tbt_s,
            self.slo.tbt_tail_share,
            self.decode_recheck,
            self.prior_output_tokens,
            self.prior_decode_s,
            self.decode_time_s or 0.0,
            self.rate_horizon_s,
            EvictionRule[self.eviction.upper()],
        )
        prefill = np.zeros(self.n_prefill, PREFILL_PARAMETERS)
        i = 0
        for pool in self.prefill:
            node, nodes = pool.profile, pool.pipeline_nodes
            prefill[i : i + pool.count] = (
                node.prefill.base_s,
                node.prefill.linear_s,
                node.prefill.quadratic_s,
                node.prefill.chunk_tokens,
                node.prefill.chunk_overhead_s,
                nodes * node.h2d_bytes_per_s,
                nodes * node.nic_bytes_per_s,
                nodes * node.device_kv_tokens // self.block_tokens,
                nodes * node.host_kv_tokens // self.block_tokens,
                nodes,
                nodes * node.disk_kv_tokens // self.block_tokens,
                nodes * node.disk_bytes_per_s,
            )
            i += pool.count
        decode = np.zeros(self.n_decode, DECODE_PARAMETERS)
        i = 0
        for decode_pool in self.decode:
            node = decode_pool.profile
            decode[i : i + decode_pool.count] = (
                node.decode.base_s,
                node.decode.per_request_s,
                node.decode.per_token_s,
                node.join_bytes_per_s,
                node.nic_bytes_per_s,
                node.decode_kv_tokens,
                node.max_batch,
            )
            i += decode_pool.count
        return Parameters(cluster, prefill, decode)


class CoupledPool(Nodes):
    """Nodes that do both phases, as vLLM's do: the papers' baseline (docs/physics.md, "Coupled instances")."""

    prefill: PrefillTimes | None = None
    decode: DecodeTimes | None = None
    decode_kv_tokens: PositiveCount | None = Field(default=None, description="KV a node has VRAM for")
    max_batch: PositiveCount | None = None
    prefix_cache: bool = Field(default=False, description="reuse prefixes still in VRAM")
    chunk_tokens: PositiveCount | None = Field(
        default=None,
        description="prefill tokens an iteration carries at most; none: prefill blocks decode",
    )

    @property
    def profile(self) -> HardwareProfile:
        """The hardware profile with this pool's own fields in place."""
        return self._profile_with(
            self.model_dump(exclude={"count", "hardware", "prefix_cache", "chunk_tokens"}, exclude_none=True)
        )


class CoupledSpec(_Described):
    """A cluster of coupled instances, of one or more kinds of node."""

    name: str = "coupled"
    coupled: tuple[CoupledPool, ...] = Field(min_length=1)
    slo: Slo = Slo()
    block_tokens: PositiveCount = Field(default=512, description="tokens per KV block, that of the traces (paper A3)")

    @property
    def n_instances(self) -> int:
        """Instances I of all pools."""
        return sum(pool.count for pool in self.coupled)

    def parameters(self) -> tuple[Records, Records]:
        """What the kernel reads: COUPLED_CLUSTER [1], COUPLED_PARAMETERS [I] in the order of the pools."""
        cluster = np.zeros(1, COUPLED_CLUSTER)
        cluster[0] = (self.block_tokens, self.slo.ttft_s, self.slo.tbt_s, self.slo.tbt_tail_share)
        nodes = np.zeros(self.n_instances, COUPLED_PARAMETERS)
        i = 0
        for pool in self.coupled:
            node = pool.profile
            nodes[i : i + pool.count] = (
                node.prefill.base_s,
                node.prefill.linear_s,
                node.prefill.quadratic_s,
                node.decode.base_s,
                node.decode.per_request_s,
                node.decode.per_token_s,
                node.decode_kv_tokens,
                node.max_batch,
                pool.prefix_cache,
                pool.chunk_tokens or 0,
            )
            i += pool.count
        return cluster, nodes


Described = TypeVar("Described", bound=BaseModel)


@cache
def _builtin() -> dict[str, dict[str, Any]]:
    text = (resources.files(__package__) / "clusters.yaml").read_text()
    return dict(yaml.safe_load(text))


def cluster_names() -> list[str]:
    """Names of the built-in clusters with a prefill and a decode pool."""
    return [name for name, fields in _builtin().items() if "coupled" not in fields]


def coupled_names() -> list[str]:
    """Names of the built-in clusters of coupled instances."""
    return [name for name, fields in _builtin().items() if "coupled" in fields]


def load_cluster(name: str | Path | ClusterSpec) -> ClusterSpec:
    """A built-in cluster by name (`8p8d`), any pool sizes of the papers' nodes by name (`5p11d`), or a YAML file.

    Raises:
        SpecError: no such cluster or file, or a field that is unknown or impossible; names the field.
    """
    if isinstance(name, ClusterSpec):
        return name
    if str(name) in coupled_names():
        raise SpecError(f"{name}: its instances do both prefill and decode, which only envs.coupled simulates")
    if str(name) in _builtin():
        return validate_cluster(_builtin()[str(name)] | {"name": str(name)}, str(name))
    sizes = re.fullmatch(r"([1-9]\d{0,3})p([1-9]\d{0,3})d", str(name))
    if sizes:
        hardware = "a800x8-llama2-70b"
        return validate_cluster(
            {
                "name": str(name),
                "prefill": [{"count": int(sizes[1]), "hardware": hardware}],
                "decode": [{"count": int(sizes[2]), "hardware": hardware}],
            },
            str(name),
        )
    path = Path(name)
    if not path.is_file():
        raise SpecError(
            f"no cluster is called {str(name)!r} and no such file exists; built in are {', '.join(cluster_names())} "
            "and any <prefills>p<decodes>d, e.g. 5p11d"
        )
    return validate_cluster(fields_of(path, "prefill and decode pools"), str(path), path.parent)


def load_coupled(name: str | Path | CoupledSpec) -> CoupledSpec:
    """A cluster of coupled instances: a built-in one by name (`vllm-16m-prefix`), or a YAML file.

    Raises:
        SpecError: no such cluster or file, or a field that is unknown or impossible; names the field.
    """
    if isinstance(name, CoupledSpec):
        return name
    if str(name) in coupled_names():
        return validated(CoupledSpec, _builtin()[str(name)] | {"name": str(name)}, str(name))
    path = Path(name)
    if not path.is_file():
        raise SpecError(
            f"no cluster of coupled instances is called {str(name)!r} and no such file exists; built in are "
            f"{', '.join(coupled_names())}"
        )
    return validated(CoupledSpec, fields_of(path, "coupled pools"), str(path), path.parent)


def fields_of(path: Path, content: str) -> dict[str, Any]:
    """What a YAML file says, with the name of the file.

    Raises:
        SpecError: it is no mapping.
    """
    try:
        fields = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not YAML: {error}") from None
    if not isinstance(fields, dict):
        raise SpecError(f"{path}: expected a mapping with {content}, found {type(fields).__name__}")
    return {"name": path.stem} | fields


def validate_cluster(fields: dict[str, Any], where: str, folder: Path = Path()) -> ClusterSpec:
    """A spec from its fields; as `validated`."""
    return validated(ClusterSpec, fields, where, folder)


def validated(kind: type[Described], fields: dict[str, Any], where: str, folder: Path = Path()) -> Described:
    """What a file describes, from its fields; the files of hardware profiles that it names are in `folder`.

    Raises:
        SpecError: one line for each wrong field, each with `where` before it.
    """
    try:
        return kind.model_validate(fields, context={"folder": folder})
    except ValidationError as error:
        problems = error.errors()
        lines = []
        for problem in problems:
            field = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "too_short" and any(
                other["loc"][:1] == problem["loc"] and other is not problem for other in problems
            ):
                continue  # pydantic counts only the items that were right; the wrong ones have lines of their own
            message = "no such field" if problem["type"] == "extra_forbidden" else problem["msg"]
            found = "" if isinstance(problem["input"], dict | list) else f", found {problem['input']!r}"
            message = message.removeprefix("Value error, ")  # of the whole, it names its field itself
            lines.append(f"{where}: {field}: {message}{found}" if field else f"{where}: {message}{found}")
        raise SpecError("\n".join(lines)) from None
