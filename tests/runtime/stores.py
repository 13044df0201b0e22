"""What a Mooncake Store's master says of itself."""

from __future__ import annotations

import re
import urllib.request

from runtime.local_workers import LocalWorkers


def objects(workers: LocalWorkers) -> int:
    """How many objects are in the store."""
    return _metric(workers, "master_key_count")


def clients(workers: LocalWorkers) -> int:
    """How many clients that lend memory the master takes to be alive."""
    return _metric(workers, "master_active_clients")


def _metric(workers: LocalWorkers, name: str) -> int:
    url = f"http://127.0.0.1:{workers.master_ports[1]}/metrics"
    with urllib.request.urlopen(url, timeout=20) as answer:
        text = answer.read().decode()
    found = re.search(rf"^{name} (\d+)", text, re.M)
    assert found, f"the master does not export {name}"
    return int(found[1])
