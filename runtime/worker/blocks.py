"""The bytes of KV blocks on the three tiers: two tensors and a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from .kvcache import Tier


class BlockStore:
    """All blocks, numbered within their tiers.

    Attributes:
        device: [device blocks, layers, 2 (keys, values), KV heads, block tokens, head dimension].
        block_bytes: size of one block, all layers.

    Args:
        shape: of one block: layers, 2, KV heads, block tokens, head dimension. capacities: blocks of each tier.
        disk_path: folder for the file of the disk tier, which goes with the process.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        capacities: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        disk_path: Path | None = None,
    ) -> None:
        self.shape = shape
        # Zeros: what is behind the end of a sequence is masked out, but must be numbers.
        self.device = torch.zeros((capacities[Tier.DEVICE], *shape), dtype=dtype, device=device)
        self.host = torch.zeros((capacities[Tier.HOST], *shape), dtype=dtype, pin_memory=device.type == "cuda")
        self.block_bytes = self.device.element_size() * int(np.prod(shape))
        self._file = tempfile.TemporaryFile(dir=disk_path) if capacities[Tier.DISK] else None  # noqa: SIM115

    def read(self, tier: Tier, slot: int) -> bytes:
        """A block's content, in the byte order of the machine."""
        if tier == Tier.DISK:
            assert self._file is not None
            return os.pread(self._file.fileno(), self.block_bytes, slot * self.block_bytes)
        block = (self.device if tier == Tier.DEVICE else self.host)[slot]
        return block.cpu().view(torch.uint8).numpy().tobytes()

    def write(self, slot: int, content: bytes) -> None:
        """Fill a device block.

        Raises:
            ValueError: not the size of a block.
        """
        if len(content) != self.block_bytes:
            raise ValueError(f"expected {self.block_bytes} bytes for a block, found {len(content)}")
        self.device[slot].copy_(self._tensor(content))

    def move(self, source: Tier, source_slot: int, target: Tier, target_slot: int) -> None:
        """Copy a block from one tier to another."""
        if target == Tier.DISK:
            assert self._file is not None
            os.pwrite(self._file.fileno(), self.read(source, source_slot), target_slot * self.block_bytes)
            return
        to = self.device if target == Tier.DEVICE else self.host
        if source == Tier.DISK:
            to[target_slot].copy_(self._tensor(self.read(source, source_slot)))
        else:
            to[target_slot].copy_((self.device if source == Tier.DEVICE else self.host)[source_slot])

    def _tensor(self, content: bytes) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(self.device.dtype).view(self.shape)
