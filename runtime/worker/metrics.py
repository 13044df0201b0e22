"""The worker's Prometheus metrics, by vLLM's names (vllm/v1/metrics/loggers.py) as far as it has such a thing."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_LABELS = ("model_name", "engine")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class WorkerMetrics:
    """All series of one worker, in a registry of its own.

    Gauges read the engine's books when they are scraped: `watch` names where.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._values = {"model_name": model_name, "engine": "0"}
        count, seconds = self._counter, self._histogram
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of requests whose prefill is done")
        self.generation_tokens = count("generation_tokens", "Tokens generated")
        self.prefix_queries = count("prefix_cache_queries", "Tokens looked up in the worker's own cache")
        self.prefix_hits = count("prefix_cache_hits", "Tokens found there")
        self.external_queries = count("external_prefix_cache_queries", "Tokens asked of other workers")
        self.external_hits = count("external_prefix_cache_hits", "Tokens that other workers sent")
        self.transfer_bytes = count("nixl_bytes_transferred", "Bytes of KV received from other workers")
        self.failed_transfers = count("nixl_num_failed_transfers", "Transfers of KV that failed")
        self.replicated_blocks = count("kv_replicated_blocks", "Blocks of the pool that were copied to this node")
        self.expired_handovers = count("nixl_num_kv_expired_reqs", "Requests whose KV nobody pulled in time")
        self.ttft_s = seconds("time_to_first_token_seconds", "From arrival to the first token")
        self.itl_s = seconds("inter_token_latency_seconds", "Between two tokens of a request")
        self.e2e_s = seconds("e2e_request_latency_seconds", "From arrival to the last token")
        self.queue_s = seconds("request_queue_time_seconds", "From arrival to admission")
        self.prefill_s = seconds("request_prefill_time_seconds", "From admission to the first token")
        self.decode_s = seconds("request_decode_time_seconds", "From the first token to the last")
        self.transfer_s = seconds("nixl_xfer_time_seconds", "Pulling the KV of a request")
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from",
            (*_LABELS, "source"),
            registry=self.registry,
        )
        self.by_source = {source: by_source.labels(**self._values, source=source) for source in SOURCES}
        self._success = Counter(
            "vllm:request_success", "Requests by how they ended", (*_LABELS, "finished_reason"), registry=self.registry
        )

    def finished(self, reason: str) -> None:
        """A request ended: stop, length, abort or error."""
        self._success.labels(**self._values, finished_reason=reason).inc()

    def cache_config(self, block_tokens: int, device_blocks: int, host_blocks: int, disk_blocks: int) -> None:
        """Say once what the cache is made of."""
        facts = {
            "block_size": block_tokens,
            "num_gpu_blocks": device_blocks,
            "num_cpu_blocks": host_blocks,
            "num_disk_blocks": disk_blocks,
            "enable_prefix_caching": True,
            "engine": "0",
        }
        info = Gauge("vllm:cache_config_info", "The KV cache's configuration", tuple(facts), registry=self.registry)
        info.labels(**{name: str(value) for name, value in facts.items()}).set(1)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        Gauge(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(**self._values).set_function(read)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(**self._values)

    def _histogram(self, name: str, text: str) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=_SECONDS)
        return histogram.labels(**self._values)
