"""What live traffic asks of the kernels: a request observed as it arrives, a policy's choice for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from ..observe import observe
from .compile import compiled
from .events import note_arrival
from .memory import OBSERVATION, clock_of, cluster_of, decode_allowed, f8_at, record_at, source_allowed
from .memory import _numbers_at as numbers_at
from .replay import ADMISSION, ROUTER, choose

CHOICE = np.dtype(
    [
        (name, "i8")
        for name in (
            "observation",  # addresses of a header and of the tables of `choose`
            *("router", "router_values", "router_count"),
            *("admission", "admission_values", "admission_count"),
            "memory",
        )
    ]
)
"""A compiled policy on an observation: passing its parts one by one takes longer than most policies."""

INVALID = -1

_choice_at: Any = record_at(CHOICE)
_observation_at: Any = record_at(OBSERVATION)
_u8_at: Any = numbers_at(types.uint64)


def _function_at(signature: Any) -> Any:
    """An intrinsic address -> compiled function of a signature (`replay.Callback`)."""
    kind = types.FunctionType(signature)

    @intrinsic
    def at(typing_context, address):
        def generate(context, builder, signature, arguments):
            function = cgutils.create_struct_proxy(kind)(context, builder)
            nothing = ir.Constant(function.c_addr.type, None)
            function.c_addr = builder.inttoptr(arguments[0], function.c_addr.type)
            function.py_addr = nothing
            function.jit_addr = nothing
            return function._getvalue()

        return kind(types.int64), generate

    return at


_router_at: Any = _function_at(ROUTER)
_admission_at: Any = _function_at(ADMISSION)


@compiled
def choose_one(at):
    """The action of the policy whose CHOICE is at an address, as `replay.step` takes it; INVALID where it chose an
    instance that may not be chosen.
    """
    choice = _choice_at(at, 0)
    observation = _observation_at(choice.observation, 0)
    decision = np.empty(3, np.int64)
    choose(
        observation,
        _router_at(choice.router),
        carray(f8_at(choice.router_values), choice.router_count),
        _admission_at(choice.admission),
        carray(f8_at(choice.admission_values), choice.admission_count),
        carray(_u8_at(choice.memory), 4),
        decision,
    )
    p = decision[0]
    d = decision[1]
    if p < 0:
        return 0
    if p >= observation.prefills or d < 0 or d >= observation.decodes:
        return INVALID
    if not source_allowed(observation, p, 0) or not decode_allowed(observation, d):
        return INVALID
    source = decision[2] if source_allowed(observation, p, decision[2]) else 0
    return 1 + (p * observation.decodes + d) * 3 + source


@compiled
def observe_request(
    state,
    parameters,
    arrival_s,
    ttft_slo_s,
    tbt_slo_s,
    input_tokens,
    block_ids,
    block_count,
    observation,
    matched,
    forecast,
):
    """A request with SLOs of its own arrives; then as `envs.observe.observe`."""
    cluster = cluster_of(parameters)
    cluster.ttft_slo_s = ttft_slo_s
    cluster.tbt_slo_s = tbt_slo_s
    note_arrival(clock_of(state), cluster, arrival_s)
    observe(state, parameters, input_tokens, block_ids, block_count, observation, matched, forecast)
