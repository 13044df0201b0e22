"""A tiny model for workers on a laptop: a Llama of 3 M random weights that reads and writes bytes.

Its answers mean nothing, but they depend on every token of the prompt, so that KV which went wrong shows. Written in
the form that Hugging Face models have, without any of their libraries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 4, 256, 8, 4, 32, 688
BEGIN, END = 256, 257  # token ids beside those of the bytes
VOCABULARY = 258
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD * 4
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write_model(folder: Path, seed: int = 0) -> None:
    """Write the model's files, float32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
        "torch_dtype": "float32",
        "bos_token_id": BEGIN,
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    template = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template | {"chat_template": TEMPLATE}))
    _write_safetensors(folder / "model.safetensors", _weights(np.random.default_rng(seed)))


def _weights(random: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    def linear(rows: int, columns: int) -> NDArray[np.float32]:
        return random.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))

    weights = {
        "model.embed_tokens.weight": random.standard_normal((VOCABULARY, HIDDEN), np.float32),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": linear(VOCABULARY, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{layer}.self_attn.q_proj.weight": 2 * linear(HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": 2 * linear(KV_HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": 2 * linear(KV_HEADS * HEAD, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": 2 * linear(HIDDEN, HEADS * HEAD),
            f"{layer}.mlp.gate_proj.weight": linear(INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": linear(INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": linear(HIDDEN, INNER),
        }
    return weights


def _write_safetensors(path: Path, tensors: dict[str, NDArray[np.float32]]) -> None:
    """The format: the header's length (u64), the header (JSON), the arrays end to end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, start + tensor.nbytes]}
        start += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def _tokenizer() -> dict[str, Any]:
    """A token for each byte."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": BEGIN, "content": "<s>", **flags}, {"id": END, "content": "</s>", **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, next_free = [], 256
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(next_free))
            next_free += 1
    return characters
