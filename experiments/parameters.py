"""What Mooncake's papers leave out (`parameters.yaml`), and the clusters and policies built with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from envs.hardware import profiles
from envs.spec import ClusterSpec, CoupledSpec, Slo

ArrivalsKind = Literal["recorded", "spread"]
ARRIVALS: tuple[ArrivalsKind, ...] = get_args(ArrivalsKind)
FACTORS = (0.5, 2.0)
"""What each number is multiplied by for `variations`."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Chosen(_Strict):
    reason: str = Field(min_length=1)
    fitted_on: tuple[str, ...] = ()


class Hardware(_Chosen):
    """A profile of `envs/hardware.yaml`: what the other parameters leave as it is."""

    value: str


class Arrivals(_Chosen):
    """When requests come that share a timestamp in a released trace: at it, or spread until the next."""

    value: ArrivalsKind


class Parameter(_Chosen):
    """A number, why it is that, and the experiments it was fitted on."""

    value: PositiveFloat


class Parameters(_Strict):
    """Every parameter the papers leave out, chosen once for all experiments."""

    hardware: Hardware
    arrivals: Arrivals
    balancing_threshold: Parameter
    step_base_s: Parameter
    step_request_s: Parameter
    step_token_s: Parameter
    join_bytes_per_s: Parameter
    decode_kv_tokens: Parameter
    device_kv_tokens: Parameter
    host_kv_tokens: Parameter
    max_batch: Parameter
    prefill_chunk_tokens: Parameter
    admission_threshold: Parameter
    decode_time_s: Parameter
    vllm_kv_tokens: Parameter
    vllm_chunk_tokens: Parameter
    arxiv_replay_speed: Parameter
    requests_per_rate: Parameter

    @classmethod
    def load(cls) -> Parameters:
        """Those of `parameters.yaml`."""
        return cls.model_validate(yaml.safe_load((resources.files(__package__) / "parameters.yaml").read_text()))

    @property
    def numbers(self) -> dict[str, Parameter]:
        """The numbers by name."""
        return {name: value for name, value in self if isinstance(value, Parameter)}

    @property
    def fitted_on(self) -> frozenset[str]:
        """Experiments whose figures any parameter was fitted on."""
        return frozenset(name for _, chosen in self for name in chosen.fitted_on)

    def scaled(self, name: str, factor: float) -> Parameters:
        """With one number multiplied."""
        number = self.numbers[name]
        return self.model_copy(update={name: number.model_copy(update={"value": number.value * factor})})

    def variations(self) -> Iterator[tuple[str, str, Parameters]]:
        """Parameters of which one differs: its name, how it does, and all of them; numbers are halved and doubled."""
        for name in self.numbers:
            for factor in FACTORS:
                yield name, f"x {factor:g}", self.scaled(name, factor)
        (other,) = set(ARRIVALS) - {self.arrivals.value}
        yield "arrivals", other, self.model_copy(update={"arrivals": self.arrivals.model_copy(update={"value": other})})

    def mooncake(self, sizes: str, *, slo: Slo | None = None, **node: float) -> ClusterSpec:
        """A Mooncake cluster.

        Args:
            sizes: `8p8d`: 8 prefill and 8 decode nodes.
            node: fields of `envs.hardware.HardwareProfile` that the experiment sets itself, e.g. `nic_bytes_per_s`.
        """
        found = re.fullmatch(r"(\d+)p(\d+)d", sizes)
        if found is None:
            raise ValueError(f"cluster {sizes!r}; expected pool sizes like 8p8d")
        host = round(self.host_kv_tokens.value)
        hardware = self._node() | {
            "device_kv_tokens": min(round(self.device_kv_tokens.value), host),
            "host_kv_tokens": host,
            "join_bytes_per_s": self.join_bytes_per_s.value,
            "decode_kv_tokens": round(self.decode_kv_tokens.value),
        }
        return ClusterSpec.model_validate(
            {
                "name": sizes,
                "prefill": [{"count": int(found[1]), "hardware": hardware | node}],
                "decode": [{"count": int(found[2]), "hardware": hardware | node}],
                "slo": slo or Slo(),
                "decode_time_s": self.decode_time_s.value,
            }
        )

    def vllm(self, kind: str, *, slo: Slo | None = None, **node: float) -> CoupledSpec:
        """A cluster of coupled instances.

        Args:
            kind: `16m`, `16m-prefix`, `16m-chunked`: 16 nodes, plain, with prefix cache, with chunked prefill.
            node: as in `mooncake`.
        """
        found = re.fullmatch(r"(\d+)m(-prefix|-chunked)?", kind)
        if found is None:
            raise ValueError(
                f"vLLM cluster {kind!r}; expected 16m, 16m-prefix or 16m-chunked, with any number of nodes"
            )
        pool: dict[str, Any] = {
            "count": int(found[1]),
            "hardware": self._node() | {"decode_kv_tokens": round(self.vllm_kv_tokens.value)} | node,
            "prefix_cache": found[2] == "-prefix",
        }
        if found[2] == "-chunked":
            pool["chunk_tokens"] = round(self.vllm_chunk_tokens.value)
        return CoupledSpec.model_validate({"name": f"vllm-{kind}", "coupled": [pool], "slo": slo or Slo()})

    def _node(self) -> dict[str, Any]:
        node = profiles()[self.hardware.value].model_dump()
        node["prefill"]["chunk_tokens"] = round(self.prefill_chunk_tokens.value)
        node["decode"] = {
            "base_s": self.step_base_s.value,
            "per_request_s": self.step_request_s.value,
            "per_token_s": self.step_token_s.value,
        }
        return node | {"max_batch": round(self.max_batch.value)}

    def policy(self, router: str, admission: str = "none") -> str:
        """A policy's name with the options chosen here. Algorithm 1's own admission (`slo`) is as printed."""
        if router == "conductor":
            router += f":threshold={self.balancing_threshold.value!r}"
        if admission not in ("none", "slo"):
            admission += f":threshold={self.admission_threshold.value!r}"
        return f"{router}+{admission}"
