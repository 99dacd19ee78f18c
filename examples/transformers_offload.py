"""Continuous batching of transformers with too little memory for its cache: three ways to go on.

Requests that find no room leave the GPU. *recompute* drops their cache and computes it anew; *transformers* is the
engine's own offloading to pinned host memory (it takes an accelerator); *kvplan* makes the same decisions and moves the
bytes. The same prompts run with room for all of them first: whatever is done, their tokens must come out.

It needs transformers 5.21 or newer; it was run with 5.21, 5.22 and 5.23.

    python examples/transformers_offload.py                          # a tiny model, on any machine
    python examples/transformers_offload.py --model llama-8b --json result.json    # on a GPU, random weights
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

import kvplan
from kvplan.cuda.machine import machine
from kvplan.engines.versions import TRANSFORMERS, release

MODELS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024},
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
}  # fmt: skip
SIZES = {"tiny": (8, 24, 40, 8, 0.5), "llama-8b": (48, 1000, 128, 16, 0.6)}  # requests, prompt, new tokens, page, room
TIMEOUT = 600
WAYS = ("kvplan", "transformers", "recompute")
NEEDED = (5, 21)  # older versions lack settings of continuous batching, or do not start without a GPU


class Run(NamedTuple):
    """One way, measured.

    Attributes:
        tokens: of every request.
        seconds: from the first step to the last token.
        first: seconds to each request's first token.
        moved: what left and came back, where something does.
    """

    tokens: dict[str, list[int]]
    seconds: float
    first: list[float]
    moved: Moved | None


class Moved:
    """Bytes that an offloading manager moves, and how long its compute stream is kept: whichever manager it is."""

    def __init__(self, offloading: Any) -> None:
        self.nbytes = 0
        self._spans: list[tuple[Any, Any]] = []
        self._bytes = {name: each.bytes_per_block for name, each in offloading.cache.cache_allocators.items()}
        self._stream = offloading._compute_stream
        store, load = offloading._offload_to_cpu, offloading.restore_scheduled_requests

        def stored(victims: Any, tables: Any) -> Any:
            with self._timed():
                taken = store(victims, tables)
            self._count(tables[request] for request in taken)
            return taken

        def loaded(requests: Any) -> None:
            held = [each.state.request_id for each in requests if each.state.is_cpu_offloaded]
            if not held:
                return load(requests)
            self._count(offloading._request_id_to_cpu_blocks[request] for request in held)
            with self._timed():
                return load(requests)

        offloading._offload_to_cpu, offloading.restore_scheduled_requests = stored, loaded

    def seconds(self) -> list[float]:
        """Of each call, once the device is done with it."""
        if self._stream is not None:
            self._stream.synchronize()
        return [end - start if self._stream is None else start.elapsed_time(end) / 1e3 for start, end in self._spans]

    def _count(self, tables: Iterable[dict[str, list[int]]]) -> None:
        for table in tables:
            self.nbytes += sum(len(blocks) * self._bytes[name] for name, blocks in table.items())

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def _now(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


def model_of(name: str, device: str) -> Any:
    """A model of random weights: what it says means nothing, and always the same."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**MODELS[name], max_position_embeddings=1 << 16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()
    return model.to(torch.bfloat16) if device != "cpu" else model


def run(model: Any, prompts: list[list[int]], new: int, page: int, blocks: int, way: str) -> Run:
    """All prompts at once, greedily; without a margin of free blocks, so that requests grow until one must leave."""
    space = 0.0 if way in ("plenty", "recompute") else 8.0 if model.device.type != "cpu" else 0.1  # GiB
    manager = model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=new),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=page, num_blocks=blocks, max_batch_tokens=max(2048, 4 * page), allow_block_sharing=False,
            safety_margin=0.0, use_cuda_graph=False, use_async_batching=False, auto_switch_to_flash=False,
            cpu_offload_space=space,
        ),
    )  # fmt: skip
    offloading = None
    if way == "kvplan":
        from kvplan.engines import transformers as kvplan_engine  # it refuses versions that differ, when it is imported

        offloading = kvplan_engine.offload(manager)
    elif way == "transformers":
        manager.batch_processor = manager._create_batch_processor()
        offloading = manager.batch_processor.offloading_manager
    moved = Moved(offloading) if offloading is not None else None
    for k, prompt in enumerate(prompts):
        manager.add_request(prompt, request_id=f"request {k}", streaming=True)
    tokens: dict[str, list[int]] = {}
    first: dict[str, float] = {}
    finished = 0
    start = time.perf_counter()
    manager.start()
    try:
        while finished < len(prompts):
            output = manager.get_result(timeout=TIMEOUT)
            if output is None or output.error:
                raise SystemExit(f"{way}: the engine failed: {output and output.error}")
            first.setdefault(output.request_id, time.perf_counter() - start)
            tokens[output.request_id] = list(output.generated_tokens)
            finished += output.is_finished()
    finally:
        seconds = time.perf_counter() - start
        manager.stop(hard_stop=True)
    if way == "kvplan":
        offloading.executor.close()
    return Run(tokens, seconds, sorted(first.values()), moved)


def row_of(way: str, one: Run, wanted: dict[str, list[int]]) -> dict[str, Any]:
    """The result, as it is printed and kept."""
    made = sum(map(len, one.tokens.values()))
    equal = sum(one.tokens[name] == tokens for name, tokens in wanted.items())
    row: dict[str, Any] = {
        "way": way, "tokens_equal": f"{equal} of {len(wanted)}", "tokens_per_second": made / one.seconds,
        "first_token_median_s": statistics.median(one.first), "seconds": one.seconds,
    }  # fmt: skip
    if one.moved is not None:
        nbytes, seconds = one.moved.nbytes, sorted(one.moved.seconds())
        row |= {
            "moves": len(seconds),
            "moved_gb": nbytes / 1e9,
            "gb_per_second": nbytes / sum(seconds) / 1e9 if seconds else 0.0,
            "move_median_ms": 1e3 * statistics.median(seconds or [0.0]),
            "move_most_ms": 1e3 * max(seconds, default=0.0),
        }
    return row


def about_of(model: Any, name: str) -> dict[str, Any]:
    """Versions, and the GPU."""
    here = machine(model.device.index) if model.device.type != "cpu" else None
    return {
        "schema": "kvplan.example.offload", "version": 1, "gpu": here and here.gpu, "torch": torch.__version__,
        "transformers": transformers.__version__, "model": name, "driver": here and here.driver,
        "sizes": dict(zip(("requests", "prompt", "new", "page", "room"), SIZES[name], strict=True)),
        "kvplan": kvplan.__version__, "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }  # fmt: skip


def main() -> int:
    """Run every way; 1 where a request's tokens differ on a CPU, whose arithmetic is the same for every batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="after the one with room for all")
    parser.add_argument("--json", type=Path, help="file for the table")
    chosen = parser.parse_args()
    if (release(transformers.__version__) or NEEDED) < NEEDED:
        parser.error(f"transformers {transformers.__version__} is installed; this example needs 5.21 or newer: "
                     f"pip install transformers=={TRANSFORMERS.written_for}")  # fmt: skip
    if chosen.json and not chosen.json.parent.is_dir():
        parser.error(f"--json is {chosen.json}: there is no folder {chosen.json.parent}")
    logging.getLogger("ContinuousBatchingLogger").setLevel(
        logging.ERROR if chosen.device != "cpu" else logging.CRITICAL
    )
    count, length, new, page, room = SIZES[chosen.model]
    rng = np.random.default_rng(0)
    lengths = rng.integers(length // 2, length + 1, count).tolist()
    prompts = [rng.integers(1, MODELS[chosen.model]["vocab_size"], n).tolist() for n in lengths]
    needed = sum(math.ceil((n + new) / page) for n in lengths)
    model = model_of(chosen.model, chosen.device)
    few, ways = prompts[:4], ["plenty", *(way for way in WAYS if way in chosen.ways)]
    if chosen.device == "cpu" and "transformers" in ways:
        ways.remove("transformers")
    pages = sum(math.ceil(len(prompt) / page) for prompt in few)
    for way in ways:
        if way != "recompute":  # kernels are built, and memory is taken, before anything counts: some leave here, too
            run(model, few, page + page // 2, page, pages + (pages if way == "plenty" else len(few) // 2), way)
    print(f"{chosen.model} on {chosen.device}: {count} requests, {sum(lengths)} prompt tokens, {new} new ones each")
    wanted: dict[str, list[int]] = {}
    ours: dict[str, list[int]] = {}
    wrong, rows = False, []
    for way in ways:
        one = run(model, prompts, new, page, 2 * needed if way == "plenty" else max(4, int(room * needed)), way)
        wanted = wanted or one.tokens
        wrong = wrong or one.tokens != wanted
        rows.append(row_of(way, one, wanted))
        ours = one.tokens if way == "kvplan" else ours
        if way == "transformers":  # whose batches are those of kvplan; other ways' round otherwise, on a GPU
            rows[-1]["as_kvplan"] = f"{sum(one.tokens[name] == made for name, made in ours.items())} of {count}"
        told = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in rows[-1].items()
        )
        print("  ".join(told), flush=True)
        if chosen.json:  # after each, so that what was measured is kept whatever comes
            chosen.json.write_text(json.dumps(about_of(model, chosen.model) | {"rows": rows}, indent=1) + "\n", "utf-8")
    return int(wrong and chosen.device == "cpu")


if __name__ == "__main__":
    sys.exit(main())
