"""The engine's tokens are those of one sequence alone, whatever it does beside: batches, chunks, tiers, endings."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.kv_events import KvEventSubscriber, prepare
from runtime.prefix_index import Medium, PrefixIndex
from runtime.worker.events import EventPublisher
from runtime.worker.kvcache import Tier

from ...waiting import until
from .conftest import BLOCK, LocalEngine

Local = Callable[..., LocalEngine]
Oracle = Callable[[list[int], int], list[int]]
Prompts = Callable[..., list[int]]


def count(engine: LocalEngine, name: str) -> float:
    """A counter's value."""
    return float(getattr(engine.engine.metrics, name)._value.get())


def test_many_at_a_time_are_each_as_alone(local: Local, oracle: Oracle, prompts: Prompts) -> None:
    engine = local(device=128, step_tokens=24, max_sequences=6)  # prompts go in chunks, and some wait
    wanted = [(prompts(n, n), 10 + n % 7) for n in (1, 16, 17, 40, 95, 33, 64, 5, 80)]
    running = [engine.begin(prompt, tokens) for prompt, tokens in wanted]
    for each, (prompt, tokens) in zip(running, wanted, strict=True):
        assert each.tokens() == oracle(prompt, tokens)
    assert engine.in_use() == [0, 0, 0]


def test_a_prefix_is_found_again(local: Local, oracle: Oracle, prompts: Prompts) -> None:
    engine = local()
    prompt = prompts(70)
    first = engine.begin(prompt, 30)
    said = first.tokens()
    assert first.sequence.local_tokens == 0
    longer = [*prompt, *said, *prompts(10, 1)]  # as a second turn: prompt and answer come back
    second = engine.begin(longer, 8)
    assert second.tokens() == oracle(longer, 8)
    assert second.sequence.local_tokens == 96  # of 99 tokens whose KV there was
    assert count(engine, "prefix_hits") == 96
    other = engine.begin(longer, 8, cache_salt="tenant")
    assert other.tokens() == oracle(longer, 8)
    assert other.sequence.local_tokens == 0


def test_a_prompt_of_whole_blocks_computes_its_last_block(local: Local, oracle: Oracle, prompts: Prompts) -> None:
    engine = local()
    prompt = prompts(4 * BLOCK)
    assert engine.generate(prompt, 5) == oracle(prompt, 5)
    again = engine.begin(prompt, 5)
    assert again.tokens() == oracle(prompt, 5)
    assert again.sequence.local_tokens == 3 * BLOCK


@pytest.mark.parametrize("below", [(30, 0), (0, 30), (4, 40)])
def test_what_went_to_host_and_disk_comes_back_the_same(
    local: Local, oracle: Oracle, prompts: Prompts, below: tuple[int, int]
) -> None:
    engine = local(8, *below)
    texts = [prompts(100, seed) for seed in range(4)]
    for text in texts:  # each takes 7 of 8 blocks
        assert engine.generate(text, 8) == oracle(text, 8)
    for text in texts:
        again = engine.begin(text, 8)
        assert again.tokens() == oracle(text, 8)
        assert again.sequence.local_tokens == 96, "it was to be on a lower tier"
    assert engine.in_use() == [0, 0, 0]


def test_without_lower_tiers_it_is_computed_anew(local: Local, oracle: Oracle, prompts: Prompts) -> None:
    engine = local(8)
    texts = [prompts(100, seed) for seed in range(2)]
    for text in (*texts, texts[0]):
        run = engine.begin(text, 8)
        assert run.tokens() == oracle(text, 8)
        assert run.sequence.local_tokens < 32


def test_an_answer_ends_as_asked(local: Local, oracle: Oracle, prompts: Prompts) -> None:
    engine = local()
    prompt = prompts(20)
    expected = oracle(prompt, 12)
    ending = expected[5]
    first = expected.index(ending)
    run = engine.begin(prompt, 12, stop_token_ids=frozenset([ending]))
    assert run.tokens() == expected[: first + 1]
    assert engine.ask(lambda: run.sequence not in engine.engine.running)
    kept_on = engine.begin(prompt, 12, stop_token_ids=frozenset([ending]), min_tokens=first + 1).tokens()
    assert kept_on[:first] == expected[:first] and len(kept_on) > first + 1 and ending not in kept_on[: first + 1]
    engine.engine.model.eos = frozenset([ending])
    assert engine.generate(prompt, 12, ignore_eos=False) == expected[: first + 1]
    assert engine.generate(prompt, 12, ignore_eos=True) == expected


def test_a_seed_draws_the_same_in_any_company(local: Local, prompts: Prompts) -> None:
    engine = local(device=128)
    prompt = prompts(30)
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 7, "top_p": 0.9}
    alone = engine.generate(prompt, 16, **asked)
    company = [engine.begin(prompts(40, i), 20, temperature=1.0) for i in range(4)]
    assert engine.generate(prompt, 16, **asked) == alone
    assert engine.generate(prompt, 16, **(asked | {"seed": 8})) != alone
    for each in company:
        each.tokens()


def test_what_is_given_up_leaves_nothing(local: Local, oracle: Oracle, prompts: Prompts) -> None:
    engine = local(device=40, max_sequences=2)
    runs = [engine.begin(prompts(50, i), 400 if i < 2 else 4) for i in range(4)]  # two run, two wait
    runs[0].updates.get(timeout=30.0)
    engine.engine.abort(runs[3].sequence)
    engine.engine.abort(runs[0].sequence)
    engine.engine.abort(runs[1].sequence)
    assert runs[2].tokens() == oracle(prompts(50, 2), 4)
    assert engine.in_use() == [0, 0, 0]
    assert engine.ask(lambda: engine.engine.cache.promised) == 0
    assert engine.ask(lambda: len(engine.engine.waiting) + len(engine.engine.running)) == 0


def test_a_step_that_fails_ends_its_sequences_and_no_others(local: Local, oracle: Oracle, prompts: Prompts) -> None:
    engine = local()
    step = engine.engine.model.step

    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory")

    engine.engine.model.step = fail  # type: ignore[method-assign]
    run = engine.begin(prompts(20), 4)
    assert run.tokens() == [] and run.error == "RuntimeError: no memory"
    engine.engine.model.step = step  # type: ignore[method-assign]
    assert engine.generate(prompts(20), 4) == oracle(prompts(20), 4)
    assert engine.in_use() == [0, 0, 0]


def test_kept_blocks_are_freed_when_nobody_pulls(local: Local, prompts: Prompts) -> None:
    engine = local(keep_s=0.5)
    run = engine.begin(prompts(40), 1, hand_over=True)
    run.tokens()
    assert run.handed_over is not None and len(run.handed_over) == 3
    assert engine.in_use()[0] == 3
    deadline = time.monotonic() + 10.0
    while engine.in_use()[0] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine.in_use()[0] == 0
    assert count(engine, "expired_handovers") == 1


@pytest.mark.parametrize("late", [False, True])
async def test_subscribers_believe_what_the_cache_has(local: Local, prompts: Prompts, late: bool) -> None:
    prepare()
    publisher = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "kv@worker", BLOCK)
    index = PrefixIndex(np.zeros((1000, 1), np.int64), BLOCK, instances=1)
    subscriber = KvEventSubscriber(index, 0, publisher.endpoint, publisher.replay_endpoint, topic="kv@")
    engine = local(12, 6, 9, publisher=publisher)
    try:
        if not late:
            subscriber.start()
        shared = prompts(50, 99)
        texts = [shared[: 16 * (seed % 4)] + prompts(60, seed) for seed in range(8)]
        for i in range(16):
            engine.generate(texts[(i * 5) % 8], 10, cache_salt="salt" if i % 3 == 0 else "")
        if late:
            subscriber.start()
        await until(lambda: subscriber.synced and subscriber.last_seq == publisher._sequence - 1)
        cache = engine.engine.cache
        committed = engine.ask(lambda: {value: block.tier for value, block in cache.committed.items()})
        assert len({*committed.values()}) == 3, "all tiers were to be in use"
        for tier, medium in zip(Tier, (Medium.GPU, Medium.CPU, Medium.DISK), strict=True):
            assert index.resident(0, medium) == sum(where == tier for where in committed.values())
        numbers = [int(index.find(np.array([value], np.uint64))[0]) for value in committed]
        on_any = [int(index.blocks[number, 0]) & 1 for number in numbers]
        assert all(on_any), "the index has other blocks"
        assert subscriber.orphans == subscriber.decode_errors == subscriber.losses == 0
        assert not any(subscriber.ignored.values())
        assert engine.ask(cache.clear)
        engine.generate(prompts(40, 5), 2)
        await until(lambda: subscriber.last_seq == publisher._sequence - 1)
        assert index.resident(0, Medium.GPU) == 2 and not index.resident(0, Medium.CPU)
    finally:
        await subscriber.close()
        engine.engine.stop()
        publisher.close()
