"""Hardware profiles: how long prefill and decode take on a node, how fast it moves KV, how much it holds."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated

import numpy as np
import yaml
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

# Counts in a description: more than 2^50 is a slip, and would not fit the kernels.
Count = Annotated[int, Field(ge=0, le=1 << 50)]
PositiveCount = Annotated[int, Field(gt=0, le=1 << 50)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PrefillTimes(_Strict):
    """Seconds = base + linear (n - h) + quadratic (n^2 - h^2) + chunk_overhead per chunk after the first (paper B3)."""

    base_s: NonNegativeFloat
    linear_s: PositiveFloat
    quadratic_s: NonNegativeFloat = 0.0
    chunk_tokens: PositiveCount = Field(
        default=8192,
        description="an instance of several nodes works on as many chunks at once: with 8,192 (more than 1,000 in the "
        "paper, which gives no number) only inputs above that gain",
    )
    chunk_overhead_s: NonNegativeFloat = Field(
        default=0.0, description="0 where the fitted times were measured with chunks, as the papers' were"
    )


class DecodeTimes(_Strict):
    """Seconds of an iteration = base + per_request B + per_token K, with B requests and K context tokens."""

    base_s: PositiveFloat
    per_request_s: NonNegativeFloat
    per_token_s: NonNegativeFloat


class HardwareProfile(_Strict):
    """One node running one model."""

    source: str = Field(default="", description="where the numbers come from")
    model: str = ""
    prefill: PrefillTimes
    decode: DecodeTimes
    nic_bytes_per_s: PositiveFloat = Field(description="RDMA, each direction")
    h2d_bytes_per_s: PositiveFloat = Field(description="host to device, for a cached prefix")
    join_bytes_per_s: PositiveFloat = Field(description="host to device, for a request that joins a decode batch")
    device_kv_tokens: Count = Field(description="KV a prefill node caches in VRAM")
    host_kv_tokens: Count = Field(description="KV a prefill node caches in DRAM")
    disk_kv_tokens: Count = Field(default=0, description="KV a prefill node keeps on disk; 0: none")
    disk_bytes_per_s: PositiveFloat = Field(default=6e9, description="reading from disk")
    decode_kv_tokens: PositiveCount = Field(description="KV a decode node has VRAM for")
    max_batch: PositiveCount = Field(default=256, description="sequences in a decode batch")


@cache
def profiles() -> dict[str, HardwareProfile]:
    """The built-in profiles by name."""
    text = (resources.files(__package__) / "hardware.yaml").read_text()
    return {name: HardwareProfile.model_validate(fields) for name, fields in yaml.safe_load(text).items()}


def fit_prefill(new_tokens: ArrayLike, prefix_tokens: ArrayLike, seconds: ArrayLike) -> PrefillTimes:
    """Fit prefill times by relative least squares with non-negative terms.

    Args:
        new_tokens, prefix_tokens, seconds: measurements, one entry each.
    """
    new, prefix = np.asarray(new_tokens, float), np.asarray(prefix_tokens, float)
    terms = np.stack([np.ones_like(new), new, (new + prefix) ** 2 - prefix**2], axis=1)
    base, linear, quadratic = relative_fit(terms, np.asarray(seconds, float)).tolist()
    return PrefillTimes(base_s=base, linear_s=linear, quadratic_s=quadratic)


def fit_decode(batch: ArrayLike, context_tokens: ArrayLike, seconds: ArrayLike) -> DecodeTimes:
    """Fit iteration times by relative least squares with non-negative terms.

    Args:
        batch, context_tokens, seconds: measurements; context summed over the batch.
    """
    requests = np.asarray(batch, float)
    terms = np.stack([np.ones_like(requests), requests, np.asarray(context_tokens, float)], axis=1)
    base, per_request, per_token = relative_fit(terms, np.asarray(seconds, float)).tolist()
    return DecodeTimes(base_s=base, per_request_s=per_request, per_token_s=per_token)


def relative_fit(terms: np.ndarray, seconds: np.ndarray, besides: ArrayLike = 0.0) -> np.ndarray:
    """Non-negative coefficients [T] that make terms [N, T] times them, and `besides` [N], closest to seconds [N].

    Close is meant by ratio: short and long times count alike.
    """
    from scipy.optimize import nnls  # a second to import; only fitting needs it

    relative = terms / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    solution, _ = nnls(relative / scale, 1 - np.asarray(besides) / seconds)
    return np.asarray(solution / scale)
