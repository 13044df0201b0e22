"""`python -m runtime.worker`: a prefill or decode worker with vLLM's HTTP contract, for machines without vLLM."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from typing import Annotated

import typer

EXIT_BAD_INPUT = 2
EPILOG = """examples:

python -m runtime.worker --role prefill --http 127.0.0.1:8100 --kv-events 127.0.0.1:5557

python -m runtime.worker --role decode --http 127.0.0.1:8200 --host-blocks 4096

    two processes with the same random weights; docs/workers.md has a request that goes through both
"""


app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


class Role(StrEnum):
    prefill = "prefill"
    decode = "decode"
    both = "both"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command(epilog=EPILOG)
def main(
    role: Annotated[Role, typer.Option(help="prefill hands KV over, decode pulls it, both do either")] = Role.both,
    http: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one")] = "127.0.0.1:8000",
    transfer: Annotated[str, typer.Option(help="HOST:PORT where other workers pull KV")] = "127.0.0.1:0",
    advertise: Annotated[str, typer.Option(help="Host by which others reach this one; default: as bound")] = "",
    kv_events: Annotated[str, typer.Option(help="HOST:PORT that publishes KV events; empty: none")] = "",
    kv_replay: Annotated[str, typer.Option(help="HOST:PORT that replays them; default: a free port")] = "",
    kv_topic: Annotated[str, typer.Option(help="Topic of the KV events")] = "kv-events",
    model: Annotated[str, typer.Option(help="Folder of a transformers model, or tiny: random weights")] = "tiny",
    served_model_name: Annotated[str, typer.Option(help="Name in requests; default: the folder's")] = "",
    dtype: Annotated[Dtype, typer.Option(help="Of weights and KV; tokens are exact in float32")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu, cuda[:N]")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the model")] = 1,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block")] = 16,
    device_blocks: Annotated[int, typer.Option(min=1, help="KV blocks on the device")] = 1024,
    host_blocks: Annotated[int, typer.Option(min=0, help="KV blocks in host memory")] = 0,
    disk_blocks: Annotated[int, typer.Option(min=0, help="KV blocks on disk")] = 0,
    disk_path: Annotated[str, typer.Option(help="Folder for their file; default: the system's temporary one")] = "",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences at a time")] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a step; longer prompts go in chunks")
    ] = 512,
    keep_s: Annotated[float, typer.Option(min=0.01, help="How long KV waits to be pulled")] = 60.0,
    transfer_timeout_s: Annotated[float, typer.Option(min=0.01, help="For connecting, and for each block")] = 10.0,
    store: Annotated[
        str, typer.Option(help="HOST:PORT of a Mooncake Store's master: the pool that blocks go to and come from")
    ] = "",
    store_blocks: Annotated[int, typer.Option(min=0, help="KV blocks of memory that are lent to the store")] = 1024,
    drain_s: Annotated[float, typer.Option(min=0.0, help="How long requests may go on after SIGTERM")] = 10.0,
    layers: Annotated[int, typer.Option(min=1, help="Of the tiny model")] = 4,
    hidden: Annotated[int, typer.Option(min=1, help="Of the tiny model")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Of the tiny model")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="Of the tiny model")] = 4,
    vocabulary: Annotated[int, typer.Option(min=8, help="Of the tiny model")] = 32000,
    context: Annotated[int, typer.Option(min=2, help="Most tokens of a sequence, of the tiny model")] = 4096,
    seed: Annotated[int, typer.Option(help="Of the tiny model's weights")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more")] = False,
) -> None:
    """Serve a transformers model as a prefill or decode worker. When it listens, its addresses are one line of JSON."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        from .model import TinyModel
        from .worker import FAULTS, Options, run
    except ImportError as error:
        print(f"the worker needs {error.name}: pip install 'conductor-gym[worker]'", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    try:
        run(
            Options(
                role=role.value,
                http=http,
                transfer=transfer,
                advertise=advertise,
                kv_events=kv_events,
                kv_replay=kv_replay,
                kv_topic=kv_topic,
                model=model,
                served_model_name=served_model_name,
                dtype=dtype.value,
                device=device,
                threads=threads,
                block_size=block_size,
                device_blocks=device_blocks,
                host_blocks=host_blocks,
                disk_blocks=disk_blocks,
                disk_path=disk_path,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                keep_s=keep_s,
                transfer_timeout_s=transfer_timeout_s,
                store=store,
                store_blocks=store_blocks,
                drain_s=drain_s,
                tiny=TinyModel(layers, hidden, heads, kv_heads, vocabulary, context, seed),
            )
        )
    except FAULTS as error:
        print(f"runtime.worker: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


if __name__ == "__main__":
    app(prog_name="python -m runtime.worker")
