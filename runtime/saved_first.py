"""A plugin of vLLM's: a worker answers when its blocks are in Mooncake Store.

vLLM's MooncakeStoreConnector saves in the background, and nothing tells when that is done. A decode worker that looks
for a prompt as soon as the prefill worker has answered is often too early, finds nothing and computes all of it again.

Not imported here: `runtime.vllm_workers` gives it to workers, which run in an environment of vLLM's.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker

    begin = MooncakeStoreWorker.wait_for_save

    def save(self: Any, metadata: Any) -> None:
        begin(self, metadata)
        if self.kv_send_thread is not None:
            self.kv_send_thread.request_queue.join()

    MooncakeStoreWorker.wait_for_save = save
