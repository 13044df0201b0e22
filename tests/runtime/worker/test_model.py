"""The paged model computes what transformers' own does, and a row the same whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from runtime.worker.blocks import BlockStore
from runtime.worker.kvcache import Tier
from runtime.worker.model import ModelError, PagedModel, Part, TinyModel, load_model, sample

from .conftest import BLOCK
from .processes import TINY

Prompts = Callable[..., list[int]]


class Run:
    """A paged model and room for sequences of up to 20 blocks."""

    def __init__(self, model: torch.nn.Module, block: int = BLOCK) -> None:
        self.model = PagedModel(model, torch.device("cpu"), block)
        self.store = BlockStore(self.model.block_shape, (400, 0, 0), torch.float32, self.model.device)
        self.block = block

    def part(self, place: int, tokens: list[int], start: int, end: int) -> Part:
        # Blocks of one sequence neither follow each other nor are in order.
        slots = [(place * 20 + 7 * i) % 400 for i in range(20)][: -(-end // self.block)]
        return Part(tokens[start:end], start, slots)

    def logits(self, *parts: Part) -> torch.Tensor:
        return self.model.step(list(parts), self.store)

    def greedy(self, prompt: list[int], count: int, place: int = 0) -> list[int]:
        tokens, done = list(prompt), 0
        while len(tokens) < len(prompt) + count:
            logits = self.logits(self.part(place, tokens, done, len(tokens)))
            done = len(tokens)
            tokens.append(int(logits[0].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def tiny() -> Run:
    return Run(TINY.build(torch.float32))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 48, 100])
def test_greedy_tokens_are_those_of_generate(
    tiny: Run, oracle: Callable[..., list[int]], prompts: Prompts, length: int
) -> None:
    prompt = prompts(length, length)
    expected = oracle(prompt, 24)
    assert len(set(expected)) > 12, "an oracle that repeats itself shows nothing"
    assert tiny.greedy(prompt, 24) == expected


def test_logits_are_close_to_transformers_own(tiny: Run, prompts: Prompts) -> None:
    prompt = prompts(70, 1)
    with torch.inference_mode():
        expected = TINY.build(torch.float32).eval()(torch.tensor([prompt])).logits[0, -1]
    assert (tiny.logits(tiny.part(0, prompt, 0, 70))[0] - expected).abs().max() < 1e-4


def test_a_row_is_the_same_to_the_bit_in_any_company(tiny: Run, prompts: Prompts) -> None:
    texts = [prompts(length, 50 + length) for length in (1, 5, 16, 17, 33, 64, 90)]
    alone = [tiny.logits(tiny.part(i, text, 0, len(text)))[0] for i, text in enumerate(texts)]
    together = tiny.logits(*[tiny.part(i, text, 0, len(text)) for i, text in enumerate(texts)])
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    # and when each has one token more, and some have more of a prompt
    longer = [[*text, 9] for text in texts]
    alone = [tiny.logits(tiny.part(i, text, len(text) - 1, len(text)))[0] for i, text in enumerate(longer)]
    new = prompts(40, 99)
    parts = [tiny.part(i, text, len(text) - 1, len(text)) for i, text in enumerate(longer)]
    together = tiny.logits(*parts[:3], tiny.part(9, new, 0, 40), *parts[3:])
    together = torch.cat([together[:3], together[4:]])
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("cuts", [(16, 32, 64), (1, 2, 3), (15, 31), (50,), tuple(range(10, 70, 7))])
def test_a_prompt_is_the_same_to_the_bit_in_any_chunks(tiny: Run, prompts: Prompts, cuts: tuple[int, ...]) -> None:
    prompt = prompts(75, 3)
    whole = tiny.logits(tiny.part(0, prompt, 0, 75))
    for start, end in zip((0, *cuts), (*cuts, 75), strict=True):
        chunked = tiny.logits(tiny.part(11, prompt, start, end))
    assert torch.equal(whole, chunked)
    places = [tiny.part(place, prompt, 0, 75).slots for place in (0, 11)]
    for one, other in list(zip(*places, strict=True))[:-1]:  # behind the end of the last may be anything
        assert tiny.store.read(Tier.DEVICE, one) == tiny.store.read(Tier.DEVICE, other)


def test_another_architecture_a_block_size_and_a_folder(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompt = list(range(3, 40))
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, 37:].tolist()
    run = Run(load_model(tmp_path, torch.float32), block=5)
    assert run.model.block_shape == (2, 2, 2, 5, 32)
    assert run.greedy(prompt, 12) == expected


def test_models_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a folder with a model's config\.json"):
        load_model(tmp_path / "none", torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    with pytest.raises(ModelError, match="no-such-thing"):
        load_model(tmp_path, torch.float32)
    with pytest.raises(ModelError, match="must divide"):
        TinyModel(hidden=100, heads=3).build(torch.float32)


def test_the_same_numbers_are_the_same_weights_and_others_are_known() -> None:
    prints = [
        PagedModel(model.build(torch.float32), torch.device("cpu"), block).fingerprint
        for model, block in ((TINY, 16), (TINY, 16), (TINY, 8), (TinyModel(2, 64, 4, 2, 512, 1024, seed=1), 16))
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_sampling() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    assert sample(logits, 0.0, 0, 1.0, None) == 1
    drawn = [sample(logits, 1.0, 0, 1.0, torch.Generator().manual_seed(i)) for i in range(2000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 2000
    assert (shares - logits.softmax(0)).abs().max() < 0.04
    assert {sample(logits, 1.0, 2, 1.0, torch.Generator().manual_seed(i)) for i in range(200)} == {1, 2}
    assert {sample(logits, 1.0, 0, 0.7, torch.Generator().manual_seed(i)) for i in range(200)} == {1, 2}
    assert {sample(logits, 1.0, 0, 0.5, torch.Generator().manual_seed(i)) for i in range(50)} == {1}
