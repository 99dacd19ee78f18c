"""``python -m benchmarks.gpu.driver.stream_waits``: how fast copies through a ring are, by who waits for its slots.

Copies of 42 MiB between pinned memory and four slots, and a kernel between the slots and other memory of the GPU, as in
kvplan's staged path; but of torch alone, no line of kvplan moves a byte. Beside it, products of matrices keep the GPU
busy. Slots are waited for by the streams of the kernels, or by the thread that launches them. In the last two ways a
further stream waits for each chunk, as the model's stream waits for the layers of a load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.beside_compute import products
from benchmarks.gpu.environment import CONNECTIONS, MOST_CONNECTIONS, default_path, gpu, gpu_document
from benchmarks.gpu.sizes import FULL, SMOKE, Scale
from benchmarks.record import Row, machine, save, table
from kvplan.measure.compute import Compute, Feeder
from kvplan.measure.workload import DIRECTIONS

SLOTS, CHUNKS, ROUNDS = 4, 48, 5
CHUNK_NBYTES = {"full": 42 << 20, "smoke": 1 << 20}
NAP_SECONDS = 20e-6
COPIES = "copies alone"
KINDS = ("", "prefill", "decode")


class Way(NamedTuple):
    """Who waits for slots.

    Attributes:
        name: the way in words.
        streams: streams of kernels, which take the chunks in turn; 0 without kernels.
        thread: whether the thread that launches the kernels waits for slots, and not their streams.
        model: whether the model's stream waits for each chunk.
    """

    name: str
    streams: int
    thread: bool = False
    model: bool = False


WAYS = (Way(COPIES, 0), Way("one stream of kernels waits", 1), Way("two streams of kernels wait", 2),
        Way("the model's stream and one of kernels wait", 1, model=True),
        Way("the model's stream and two of kernels wait", 2, model=True),
        Way("the thread that launches waits", 2, thread=True))  # fmt: skip


class Pipeline:
    """Memory, streams and events of one size of chunks."""

    def __init__(self, chunk_nbytes: int, chunks: int) -> None:
        import torch

        self.nbytes, self._chunks = chunk_nbytes, chunks
        words = chunk_nbytes // 8
        self._host = torch.zeros((8, words), dtype=torch.int64, pin_memory=True)
        self._ring = torch.zeros((SLOTS, words), dtype=torch.int64, device="cuda:0")
        self._cache = torch.zeros((8, words), dtype=torch.int64, device="cuda:0")
        stream: Callable[..., Any] = torch.cuda.Stream
        self._copy = stream()
        self._kernels = [stream(priority=-5) for _ in range(2)]
        self._model = stream()
        self._token = torch.zeros(1, device="cuda:0")
        self._event: Callable[..., Any] = torch.cuda.Event
        self._on: Callable[[Any], Any] = torch.cuda.stream

    def run(self, way: Way, direction: str) -> float:
        """Move all chunks, and return the GB/s from the first copy or kernel to the last copy."""
        load = direction == "load"
        first, last = (self._event(enable_timing=True) for _ in range(2))
        filled, freed = ([self._event() for _ in range(self._chunks)] for _ in range(2))
        first.record(self._copy)
        behind = 2 if load and way.thread else 0  # chunks whose copies are in the queue before a load's kernel
        for turn in range(self._chunks + behind):
            for filling in (True, False):
                chunk = turn if filling else turn - behind
                copying = filling == load
                if not 0 <= chunk < self._chunks or not (way.streams or copying):
                    continue
                stream = self._copy if copying else self._kernels[chunk % way.streams]
                before = filled[chunk] if not filling else freed[chunk - SLOTS] if chunk >= SLOTS else None
                if before is not None and way.streams:
                    if way.thread and not copying:
                        while not before.query():
                            time.sleep(NAP_SECONDS)
                    else:
                        stream.wait_event(before)
                with self._on(stream):
                    self._move(chunk, load=load, copying=copying)
                (filled if filling else freed)[chunk].record(stream)
                if way.model and not filling:
                    self._model.wait_event(freed[chunk])
                    with self._on(self._model):
                        self._token.add_(1)
        last.record(self._copy)
        last.synchronize()
        for stream in [*self._kernels, self._model]:
            stream.synchronize()
        return float(self._chunks * self.nbytes / first.elapsed_time(last) / 1e6)

    def _move(self, chunk: int, *, load: bool, copying: bool) -> None:
        ring, other = self._ring[chunk % SLOTS], (self._host if copying else self._cache)[chunk % 8]
        source, target = (other, ring) if copying == load else (ring, other)
        target.copy_(source, non_blocking=True)


def measure(pipeline: Pipeline, compute: Compute | None, way: Way, direction: str) -> float:
    """The GB/s of one run, beside compute or alone."""
    if compute is None:
        return pipeline.run(way, direction)
    feeder = Feeder(compute, ahead=400)
    while feeder.finished < 10:
        feeder.top_up()
    gbps = pipeline.run(way, direction)
    feeder.top_up()
    compute.drain()
    if feeder.dry:
        raise RuntimeError("the queue of compute ran empty")
    return gbps


def measured(scale: Scale, chunk_nbytes: int, chunks: int, rounds: int) -> Iterator[Row]:
    """A row for each direction and kind of compute; ways in turn, medians over the rounds."""
    pipeline = Pipeline(chunk_nbytes, chunks)
    computes = {"": None} | {kind: products(scale, kind) for kind in KINDS[1:]}
    found: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(1 + rounds):  # the first round warms up
        for direction in DIRECTIONS:
            for kind in KINDS:
                for way in WAYS:
                    taken = found.setdefault((direction, kind, way.name), [])
                    taken.append(measure(pipeline, computes[kind], way, direction))
    for direction in DIRECTIONS:
        for kind in KINDS:
            speeds = {way.name: found[direction, kind, way.name][1:] for way in WAYS}
            medians = {name: statistics.median(some) for name, some in speeds.items()}
            ours = WAYS[-1].name
            beside = {name: gbps for name, gbps in medians.items() if name != ours}
            detail = {name: [round(gbps, 2) for gbps in some] for name, some in speeds.items()}
            yield Row("stream waits", f"{direction} {f'beside {kind}' if kind else 'alone'}, {ours}", "GB/s",
                      medians[ours], beside, more_is_better=True, detail=detail)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return 0; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.driver.stream_waits", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny: shows that it runs, and nothing else")
    parser.add_argument("--output", type=Path, help="JSON file; by default in benchmarks/results, none for --smoke")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault(CONNECTIONS, MOST_CONNECTIONS)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: this benchmark needs one", file=sys.stderr)
        return 2
    started, about, scale = machine(), gpu(), SMOKE if chosen.smoke else FULL
    rows = list(measured(scale, CHUNK_NBYTES["smoke" if chosen.smoke else "full"], 6 if chosen.smoke else CHUNKS,
                         1 if chosen.smoke else ROUNDS))  # fmt: skip
    print(table(rows))
    output = chosen.output or (None if chosen.smoke else default_path(about["name"], ["stream-waits"]))
    if output is not None:
        save(output, gpu_document(rows, scale=scale, started=started, about=about, failed={}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
