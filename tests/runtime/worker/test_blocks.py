"""A block's bytes come through every tier and over the wire as they were, in every type of number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.worker.blocks import BlockStore
from runtime.worker.kvcache import Tier

SHAPE = (2, 2, 3, 4, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_kept_on_all_ways(tmp_path: Path, dtype: torch.dtype) -> None:
    store = BlockStore(SHAPE, (4, 3, 5), dtype, torch.device("cpu"), tmp_path)
    blocks = torch.randn(4, *SHAPE).to(dtype)
    store.device.copy_(blocks)
    ways = [
        [(Tier.HOST, 2), (Tier.DISK, 4), (Tier.DEVICE, 0)],
        [(Tier.DISK, 0), (Tier.DEVICE, 1)],
        [(Tier.HOST, 1), (Tier.DEVICE, 2)],
    ]
    for slot, way in enumerate(ways):
        source, at = Tier.DEVICE, slot
        for target, place in way:
            store.move(source, at, target, place)
            assert store.read(target, place) == store.read(source, at)
            if source == Tier.DEVICE:
                store.device[at].zero_()
            source, at = target, place
    assert torch.equal(store.device, blocks)
    store.write(3, store.read(Tier.DEVICE, 1))
    assert torch.equal(store.device[3], blocks[1])
    assert store.block_bytes == len(store.read(Tier.HOST, 0)) == 240 * blocks.element_size()
    for size in (0, store.block_bytes - 1, store.block_bytes + 1):
        with pytest.raises(ValueError, match=f"expected {store.block_bytes} bytes for a block, found {size}"):
            store.write(0, bytes(size))
