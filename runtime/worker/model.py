"""A causal language model of `transformers`, run over paged KV blocks for many sequences at a time.

The model is transformers' own; only its attention is replaced, through `AttentionInterface`, as vLLM's transformers
backend does. The tokens of all sequences of a step go through it as one row after the other, without padding between
them; attention takes each sequence by itself.

A row's result does not depend on what else is in the step, nor on how its prompt was cut into chunks:

- Matrix products round alike for any number of rows that is a multiple of 4 (measured on CPU, float32: equal to the
  bit for 4, 8, 16 .. 512 rows; 1 and 2 rows take another kernel and differ by 1e-6). Steps are filled up to `ROWS`.
- Attention goes by tiles of one block's positions. A token at position p is row p mod block of its tile and sees the
  blocks 0 .. p div block, so the shapes of its products follow from p alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ..block_hash import xxh3_64
from .blocks import BlockStore

ROWS = 8  # steps are filled up to a multiple; AVX-512 kernels work on up to 8 rows at once, hence not 4
_ATTENTION = "conductor_paged"


class ModelError(ValueError):
    """A model that cannot be served; the message says why."""


@dataclass(frozen=True)
class TinyModel:
    """A Llama with random weights: the same in every process that names the same numbers."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 32000
    context: int = 4096
    seed: int = 0

    def build(self, dtype: torch.dtype) -> Any:
        """The model, on the CPU."""
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ModelError("the heads must divide the hidden size, and the KV heads the heads")
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.context,
            initializer_range=0.1,  # wider than for training, so that what it says depends on all of its prompt
        )
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model: Any = LlamaForCausalLM(config)
            return model.to(dtype)


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """A model from a local folder; nothing is fetched.

    Raises:
        ModelError: no such folder, or no model of a kind that can be served.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: expected a folder with a model's config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: {str(error).splitlines()[0]}") from None


class Part(NamedTuple):
    """A sequence's share of a step: its `tokens` from position `start` on, and its blocks up to their end."""

    tokens: list[int]
    start: int
    slots: list[int]


class PagedModel:
    """The model, with its KV in the device blocks of a store.

    Attributes:
        block_shape: of one block (`BlockStore.shape`). context: most tokens of a sequence. eos: ids that end one.
        fingerprint: equal where the weights and the form of a block are equal.

    Raises:
        ModelError: the model has a kind of attention that is not plain and causal.
    """

    def __init__(self, model: Any, device: torch.device, block_tokens: int) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            raise ModelError("models with sliding-window attention are not served")
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.block_tokens = block_tokens
        self.block_shape = (config.num_hidden_layers, 2, kv_heads, block_tokens, head_dim)
        self.context = int(config.max_position_embeddings)
        self.vocabulary = int(config.vocab_size)
        eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or config.eos_token_id
        self.eos = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.device = device
        self.fingerprint = self._fingerprint()  # before the model is moved: the same on all devices
        self.model.to(device)
        AttentionInterface.register(_ATTENTION, _attend)
        model.config._attn_implementation = _ATTENTION

    @torch.inference_mode()
    def _fingerprint(self) -> int:
        facts = [str(self.block_shape), str(self.model.dtype), transformers.__version__.split(".")[0]]
        facts += [f"{name} {float(weight.double().sum()):.9e}" for name, weight in self.model.named_parameters()]
        return xxh3_64("\n".join(facts).encode())

    @torch.inference_mode()
    def step(self, parts: list[Part], store: BlockStore) -> torch.Tensor:
        """Run the parts; their KV is in the blocks afterwards.

        Returns:
            float32 [parts, vocabulary] on the CPU: logits after the last token of each.
        """
        rows = sum(len(part.tokens) for part in parts)
        fill = [0] * (-rows % ROWS)
        tokens = [token for part in parts for token in part.tokens]
        positions = [part.start + i for part in parts for i in range(len(part.tokens))]
        last: list[int] = []
        for part in parts:
            last.append((last[-1] if last else -1) + len(part.tokens))
        logits: torch.Tensor = self.model(
            input_ids=torch.tensor([tokens + fill], device=self.device),
            position_ids=torch.tensor([positions + fill], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(last + [0] * (-len(last) % ROWS), device=self.device),
            paged=_Paged(parts, positions, store, self.block_tokens),
        ).logits
        return logits[0, : len(parts)].float().cpu()


class _Paged:
    """Where the rows of a step belong."""

    def __init__(self, parts: list[Part], positions: list[int], store: BlockStore, block_tokens: int) -> None:
        self.parts = parts
        self.store = store.device
        self.block_tokens = block_tokens
        device = store.device.device
        slots = [part.slots[(part.start + i) // block_tokens] for part in parts for i in range(len(part.tokens))]
        self.slots = torch.tensor(slots, device=device)
        self.offsets = torch.tensor([position % block_tokens for position in positions], device=device)
        self.of_part = [torch.tensor(part.slots, device=device) for part in parts]
        self.unseen = torch.ones(block_tokens, block_tokens, dtype=torch.bool, device=device).triu(1)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    paged: _Paged,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Put keys and values in their blocks, and attend to each sequence's own.

    Args:
        query: [1, heads, rows, dimension]; key, value: [1, KV heads, rows, dimension].

    Returns:
        [1, rows, heads, dimension]; zeros in rows that only fill up.
    """
    keys, values = paged.store[:, module.layer_idx].unbind(1)
    real = len(paged.slots)
    keys[paged.slots, :, paged.offsets] = key[0, :, :real].transpose(0, 1)
    values[paged.slots, :, paged.offsets] = value[0, :, :real].transpose(0, 1)
    out = torch.zeros_like(query[0])
    row = 0
    for part, slots in zip(paged.parts, paged.of_part, strict=True):
        count = len(part.tokens)
        _attend_part(
            query[0, :, row : row + count],
            _joined(keys[slots]),
            _joined(values[slots]),
            part.start,
            scaling,
            paged.unseen,
            out[:, row : row + count],
        )
        row += count
    return out.transpose(0, 1).unsqueeze(0), None


def _joined(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, KV heads, block tokens, dimension] as [KV heads, tokens, dimension]."""
    return blocks.transpose(0, 1).flatten(1, 2)


def _attend_part(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    scaling: float,
    unseen: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attention of the rows from position `start` on, tile by tile, into `out`."""
    heads, count, dimension = query.shape
    kv_heads, tile = keys.shape[0], unseen.shape[0]
    for first in range(start - start % tile, start + count, tile):
        begin, end = max(first, start), min(first + tile, start + count)
        rows = query.new_zeros(heads, tile, dimension)
        rows[:, begin - first : end - first] = query[:, begin - start : end - start]
        seen = first + tile
        # Query heads that share a KV head are rows of one product.
        scores = rows.view(kv_heads, -1, dimension) @ keys[:, :seen].transpose(1, 2) * scaling
        scores.view(heads, tile, seen)[:, :, first:].masked_fill_(unseen, float("-inf"))
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        found = (weights @ values[:, :seen]).view(heads, tile, dimension)
        out[:, begin - start : end - start] = found[:, begin - first : end - first]


def sample(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None
) -> int:
    """The next token: the likeliest at temperature 0, else drawn.

    Args:
        logits: float32 [vocabulary]. top_k: only the likeliest so many, 0 for all. top_p: only the likeliest that make
            up so much of the probability. generator: the request's own, where it gave a seed.
    """
    if temperature == 0.0:
        return int(logits.argmax())
    ordered, tokens = (logits / temperature).sort(descending=True, stable=True)
    if top_k:
        ordered = ordered[:top_k]
    probabilities = ordered.softmax(0)
    if top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities
        probabilities = torch.where(before < top_p, probabilities, 0.0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
