"""Blocks over the wire: whole, refused, cut off, and whatever anybody may send instead."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.block_hash import xxh3_64
from runtime.worker.engine import Handover, Holder
from runtime.worker.exchange import Exchange
from runtime.worker.kvcache import Tier
from runtime.worker.transfer import Prefix, Pull, Release, TransferError, TransferServer, fetch, release

from .conftest import LocalEngine

Local = Callable[..., LocalEngine]
Oracle = Callable[[list[int], int], list[int]]
Prompts = Callable[..., list[int]]
HOST = "127.0.0.1"


class Node:
    """An engine with its transfers, on the test's event loop."""

    def __init__(self, local: LocalEngine, patience_s: float, timeout_s: float) -> None:
        self.local, self.engine = local, local.engine
        self.exchange = Exchange(local.engine, patience_s)
        self.server = TransferServer(self.exchange.lend, timeout_s)
        self.port = 0

    async def generate(self, prompt: list[int], tokens: int, **asked: Any) -> Any:
        """A sequence when it has ended, with its `said` tokens."""
        run = self.local.begin(prompt, tokens, **asked)
        return await asyncio.to_thread(run.tokens), run

    async def prefill(self, prompt: list[int]) -> Handover:
        """What is to go to the decode side."""
        _, run = await self.generate(prompt, 1, hand_over=True)
        return Handover(HOST, self.port, self.engine.id, run.sequence.id, run.handed_over)

    async def in_use(self) -> list[int]:
        return await asyncio.to_thread(self.local.in_use)

    async def until_in_use(self, blocks: int) -> None:
        for _ in range(500):
            if (await self.in_use())[0] == blocks:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"expected {blocks} blocks in use, found {await self.in_use()}")


@contextlib.asynccontextmanager
async def nodes(*engines: LocalEngine, patience_s: float = 20.0, timeout_s: float = 20.0) -> AsyncIterator[list[Node]]:
    """`patience_s`: of those that pull. `timeout_s`: of those that are pulled from."""
    started = [Node(engine, patience_s, timeout_s) for engine in engines]
    for node in started:
        node.port = await node.server.start(HOST, 0)
    try:
        yield started
    finally:
        for node in started:
            await node.exchange.close()
            await node.server.close()


async def collect(stream: Any) -> list[bytes]:
    return [content async for content in stream]


def pull_of(node: Node, left: Handover, prompt: list[int]) -> Pull:
    """What the decode side asks for."""
    digest = xxh3_64(np.array(prompt, np.uint32).tobytes())
    mark = node.engine.model.fingerprint
    return Pull(mark, left.engine_id, left.request_id, left.block_ids, len(prompt), digest)


@pytest.mark.parametrize("length", [5, 16, 33, 64, 100])
async def test_a_decode_goes_on_where_the_prefill_ended(
    local: Local, oracle: Oracle, prompts: Prompts, length: int
) -> None:
    async with nodes(local(), local()) as (p, d):
        prompt = prompts(length, length)
        left = await p.prefill(prompt)
        assert (await p.in_use())[0] == -(-length // 16)
        said, run = await d.generate(prompt, 12, origin=left)
        assert said == oracle(prompt, 12)
        assert run.sequence.external_tokens == length
        await p.until_in_use(0)
        assert await d.in_use() == [0, 0, 0]


async def test_what_the_decode_side_has_is_not_pulled(local: Local, oracle: Oracle, prompts: Prompts) -> None:
    async with nodes(local(), local()) as (p, d):
        prompt = prompts(100)
        await d.generate(prompt[:70], 2)
        said, run = await d.generate(prompt, 8, origin=await p.prefill(prompt))
        assert said == oracle(prompt, 8)
        assert (run.sequence.local_tokens, run.sequence.external_tokens) == (64, 36)
        await p.until_in_use(0)


@pytest.mark.parametrize("tiers", [(64, 0, 0), (8, 8, 0), (8, 0, 8)])
async def test_a_prefix_comes_from_whatever_tier_of_its_holder(
    local: Local, oracle: Oracle, prompts: Prompts, tiers: tuple[int, int, int]
) -> None:
    async with nodes(local(*tiers), local()) as (holder, other):
        prompt = prompts(80)
        await holder.generate(prompt, 2)
        await holder.generate(prompts(100, 1), 2)  # takes the device where it is small
        longer = [*prompt, *prompts(30, 2)]
        said, run = await other.generate(longer, 8, origin=Holder(HOST, holder.port))
        assert said == oracle(longer, 8)
        assert run.sequence.external_tokens == 80
        assert await holder.in_use() == [0, 0, 0]
        # It is a replica now.
        said, run = await other.generate(longer, 8)
        assert said == oracle(longer, 8)
        assert run.sequence.local_tokens == 96


async def test_a_prefix_that_does_not_come_is_computed(local: Local, oracle: Oracle, prompts: Prompts) -> None:
    async with nodes(local(), local()) as (holder, other):
        prompt = prompts(60)
        said, run = await other.generate(prompt, 6, origin=Holder(HOST, holder.port))  # it has nothing
        assert (said, run.sequence.external_tokens) == (oracle(prompt, 6), 0)
        await holder.server.close()
        prompt = prompts(60, 1)
        said, run = await other.generate(prompt, 6, origin=Holder(HOST, holder.port))
        assert (said, run.sequence.external_tokens) == (oracle(prompt, 6), 0)


async def test_kv_that_was_handed_over_must_come(local: Local, prompts: Prompts) -> None:
    async with nodes(local(), local()) as (p, d):
        prompt = prompts(40)
        left = await p.prefill(prompt)
        wrong = [
            (Handover(HOST, p.port, "another", left.request_id, left.block_ids), "nothing is kept here"),
            (Handover(HOST, p.port, left.engine_id, "another", left.block_ids), "nothing is kept here"),
            (Handover(HOST, p.port, left.engine_id, left.request_id, [50, 51, 52]), "not all of these blocks"),
            (Handover(HOST, 1, left.engine_id, left.request_id, left.block_ids), "Connect"),
        ]
        for origin, reason in wrong:
            said, run = await d.generate(prompt, 4, origin=origin)
            assert said == [] and reason in run.error
        said, run = await d.generate(prompts(40, 1), 4, origin=left)
        assert said == [] and "of another prompt" in run.error
        assert await d.in_use() == [0, 0, 0]
        assert (await p.in_use())[0] == 3, "it is still to be had"
        said, run = await d.generate(prompt, 4, origin=left)
        assert len(said) == 4


async def test_other_weights_are_refused(local: Local, prompts: Prompts) -> None:
    from runtime.worker.model import TinyModel

    other = TinyModel(2, 64, 4, 2, 512, 1024, seed=1)
    async with nodes(local(), local(model=other)) as (p, d):
        prompt = prompts(40)
        said, run = await d.generate(prompt, 4, origin=await p.prefill(prompt))
        assert said == [] and "models or block sizes differ" in run.error


async def test_a_release_frees_without_a_pull(local: Local, prompts: Prompts) -> None:
    async with nodes(local()) as (p,):
        left = await p.prefill(prompts(40))
        await release(HOST, p.port, Release(left.engine_id, left.request_id), 20.0)
        await p.until_in_use(0)
        with pytest.raises(TransferError, match="nothing is kept"):
            await release(HOST, p.port, Release(left.engine_id, left.request_id), 20.0)


async def test_a_pull_that_breaks_off_can_be_made_again(local: Local, prompts: Prompts) -> None:
    async with nodes(local(), timeout_s=1.0) as (p,):
        left = await p.prefill(prompts(100))
        ask = pull_of(p, left, prompts(100))
        size = p.engine.store.block_bytes
        stream = fetch(HOST, p.port, ask, size, 7, 20.0)
        first = await anext(stream)
        await stream.aclose()
        assert (await p.in_use())[0] == 7
        again = await collect(fetch(HOST, p.port, ask, size, 7, 20.0))
        assert len(again) == 7 and again[0] == first
        await p.until_in_use(0)


async def test_bytes_are_those_of_the_cache(local: Local, prompts: Prompts) -> None:
    async with nodes(local()) as (p,):
        prompt = prompts(64)
        _, run = await p.generate(prompt, 2)
        ask = Prefix(p.engine.model.fingerprint, [*run.sequence.hashes[:4], 123])
        got = await collect(fetch(HOST, p.port, ask, p.engine.store.block_bytes, 5, 20.0))
        cache = p.engine.cache
        have = [p.engine.store.read(Tier.DEVICE, cache.committed[value].slot) for value in run.sequence.hashes[:4]]
        assert got == have


@pytest.mark.parametrize("after", [0, 3, 40, 5000])
async def test_a_holder_that_breaks_off_is_told(local: Local, prompts: Prompts, after: int) -> None:
    """A holder that sends so many bytes of what it should, and is gone."""
    async with nodes(local(), local()) as (p, d):
        prompt = prompts(100)
        left = await p.prefill(prompt)

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up, out = await asyncio.open_connection(HOST, p.port)
            out.write(await reader.read(65536))
            if after:
                writer.write(await up.readexactly(after))
                await writer.drain()
            out.close()
            writer.close()

        relayed = await asyncio.start_server(relay, HOST, 0)
        port = relayed.sockets[0].getsockname()[1]
        origin = Handover(HOST, port, left.engine_id, left.request_id, left.block_ids)
        said, run = await d.generate(prompt, 4, origin=origin)
        assert said == [] and "the connection was lost" in run.error
        assert await d.in_use() == [0, 0, 0]
        relayed.close()


async def test_a_holder_that_says_nothing_is_not_waited_for(local: Local, prompts: Prompts) -> None:
    async with nodes(local(), patience_s=0.3) as (d,):
        silent = await asyncio.start_server(lambda *_: asyncio.sleep(20), HOST, 0)
        port = silent.sockets[0].getsockname()[1]
        said, run = await d.generate(prompts(40), 4, origin=Handover(HOST, port, "e", "r", [0, 1, 2]))
        assert said == [] and "nothing came for 0.3 s" in run.error
        silent.close()


async def test_a_sequence_that_is_given_up_stops_pulling(local: Local, prompts: Prompts) -> None:
    async with nodes(local(), patience_s=60.0) as (d,):
        silent = await asyncio.start_server(lambda *_: asyncio.sleep(60), HOST, 0)
        port = silent.sockets[0].getsockname()[1]
        run = d.local.begin(prompts(40), 4, origin=Handover(HOST, port, "e", "r", [0, 1, 2]))
        await d.until_in_use(3)
        d.engine.abort(run.sequence)
        await d.until_in_use(0)
        silent.close()


def frames(generator: random.Random, good: list[bytes]) -> bytes:
    """Something that may come over a socket: good frames, damaged ones, noise."""
    kind = generator.randrange(5)
    if kind == 0:
        return generator.randbytes(generator.randrange(200))
    content = bytearray(generator.choice(good))
    if kind == 1:
        for _ in range(generator.randrange(1, 4)):
            content[generator.randrange(len(content))] = generator.randrange(256)
    elif kind == 2:
        content = content[: generator.randrange(len(content))]
    length = generator.choice([len(content), 0, len(content) + 5, 1 << 31, 4 << 20])
    if kind == 3:
        length = len(content)
    return length.to_bytes(4, "big") + bytes(content)


async def test_nothing_that_is_sent_ends_a_holder(local: Local, oracle: Oracle, prompts: Prompts) -> None:
    generator = random.Random(5)
    async with nodes(local(), local(), timeout_s=0.5) as (p, d):
        prompt = prompts(50)
        left = await p.prefill(prompt)
        mark = p.engine.model.fingerprint
        good = [
            msgspec.msgpack.encode(each)
            for each in (
                pull_of(p, left, prompt),
                Pull(mark, left.engine_id, left.request_id, [1 << 40, -3], -1, 1),
                Prefix(mark, [1, 2, (1 << 64) - 1]),
                Prefix(mark + 1, []),
                Release("e", "r"),
                {"type": "none"},
                [1, 2],
            )
        ]

        async def attack(data: bytes) -> None:
            reader, writer = await asyncio.open_connection(HOST, p.port)
            with contextlib.suppress(OSError):
                writer.write(data)
                await writer.drain()
                if generator.random() < 0.5:
                    await asyncio.wait_for(reader.read(100), 2.0)
                writer.close()

        for _ in range(10):
            await asyncio.gather(*[attack(frames(generator, good)) for _ in range(30)])
        await p.until_in_use(4)  # what it keeps for the decode side, and nothing else
        said, _ = await d.generate(prompt, 6, origin=left)
        assert said == oracle(prompt, 6)
        await p.until_in_use(0)


async def test_nothing_that_is_answered_ends_a_decode(local: Local, oracle: Oracle, prompts: Prompts) -> None:
    generator = random.Random(6)
    async with nodes(local(), patience_s=0.2) as (d,):
        good = [
            msgspec.msgpack.encode(each)
            for each in ({"blocks": 3}, {"blocks": -1}, {"blocks": 1 << 70 >> 8}, {"error": "no"})
        ]

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(generator.randrange(1, 4)):
                writer.write(frames(generator, [*good, generator.randbytes(d.engine.store.block_bytes)]))
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()

        bad = await asyncio.start_server(answer, HOST, 0)
        port = bad.sockets[0].getsockname()[1]
        for i in range(40):
            said, run = await d.generate(prompts(40, i), 2, origin=Handover(HOST, port, "e", "r", [0, 1, 2]))
            assert said == [] and run.error
        assert await d.in_use() == [0, 0, 0]
        assert (await d.generate(prompts(40), 6))[0] == oracle(prompts(40), 6)
        bad.close()
