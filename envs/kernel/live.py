"""What live traffic asks of the kernels: a request observed as it arrives, in one call."""

from __future__ import annotations

from ..observe import observe
from .compile import compiled
from .events import note_arrival
from .memory import clock_of, cluster_of


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
