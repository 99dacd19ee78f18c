"""``python -m benchmarks.gpu.ranks``: ranks of three topologies through one shared pool, a process and a GPU each.

Two ranks store under tensor parallelism into a pool that belongs to no topology; one loads all of it, then two load
half the layers each. Every byte is compared. A rank's rate beside the other is held against its rate alone, in a pool
of its own of the same kind of memory; what it reaches in anonymous memory, whose pages may be larger, stands beside it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import kvplan
from benchmarks.gpu.environment import CONNECTIONS, MOST_CONNECTIONS, default_path, gpu, gpu_document
from benchmarks.record import Row, machine, save, table

RANK_ORDER, POOL_ORDER = "layer: kv block head token dim", "block layer kv head token dim"
SHARE = 0.9  # of the rate in a pool of its own, alone
PATIENCE = 240  # seconds at a barrier or for an answer, before the run fails rather than hangs
RANKS = 2


@dataclass(frozen=True)
class Scale:
    """Sizes of a run in bf16; ``times`` transfers of all blocks make a figure."""

    layers: int = 80
    heads: int = 8
    dim: int = 128
    tokens: int = 16
    blocks: int = 256
    times: int = 9

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block of all layers and heads."""
        return self.layers * 2 * self.tokens * self.heads * self.dim * 2


SMOKE = Scale(layers=4, heads=4, dim=8, tokens=4, blocks=16, times=3)


class Measured(NamedTuple):
    """One rank's work in GB/s.

    Attributes:
        anonymous, own: in a pool of its own, alone; in anonymous memory, and where the shared pool is.
        alone: in the shared pool.
        beside: in the shared pool, the other rank at work.
        detail: the path, and each transfer's GB/s in the shared pool.
    """

    anonymous: float
    own: float
    alone: float
    beside: float
    detail: dict[str, Any]


class Part(NamedTuple):
    """The layers and heads of one rank of a topology."""

    layers: range
    heads: range


def topologies(scale: Scale) -> dict[str, list[Part]]:
    """The ranks of each step, and the part that each stores or loads."""
    layers, heads = range(scale.layers), range(scale.heads)
    halves = [(numbers[: len(numbers) // RANKS], numbers[len(numbers) // RANKS :]) for numbers in (layers, heads)]
    return {
        "store, TP 2": [Part(layers, half) for half in halves[1]],
        "load, TP 1": [Part(layers, heads)],
        "load, PP 2": [Part(half, heads) for half in halves[0]],
    }


class Worker:
    """One process: its GPU, its executor, and the pools."""

    def __init__(self, rank: int, scale: Scale, shared: str, device: str) -> None:
        import torch

        self.torch, self.rank, self.scale, self.shared = torch, rank, scale, shared
        self.device = "cpu" if device == "cpu" else f"cuda:{rank}"
        if self.device != "cpu":
            torch.cuda.set_device(rank)
        self.executor = kvplan.Executor(self.device)

    def content(self, layer: int, heads: range) -> Any:
        """Content of these heads of a layer: (kv, block, head, token, dim), the same in every process."""
        torch, scale = self.torch, self.scale
        chance = torch.Generator(self.device).manual_seed(1000 + layer)
        shape = (2, scale.blocks, scale.heads, scale.tokens, scale.dim)
        bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=self.device, generator=chance)
        return bits[:, :, heads.start : heads.stop].contiguous()

    def cache(self, part: Part, *, filled: bool) -> list[Any]:
        """The rank's tensors, a layer each, as it has computed them or poisoned."""
        made = [self.content(layer, part.heads) for layer in part.layers]
        return made if filled else [self.torch.full_like(each, -1) for each in made]

    def layout(self, part: Part, tensors: list[Any]) -> kvplan.KVLayout:
        """The rank's tensors as a layout."""
        return kvplan.KVLayout.from_tensors(RANK_ORDER, tensors, layers=part.layers, head_start=part.heads.start)

    def elsewhere(self, part: Part) -> kvplan.KVLayout:
        """The layout of a rank of another process; only its shape is known here."""
        scale = self.scale
        sizes = {"layer": len(part.layers), "block": scale.blocks, "head": len(part.heads), "token": scale.tokens,
                 "dim": scale.dim}  # fmt: skip
        spec = {"notation": RANK_ORDER, "sizes": sizes, "dtype": "int16", "layer_start": part.layers.start,
                "head_start": part.heads.start}  # fmt: skip
        return kvplan.KVLayout.from_spec(spec)

    def pool(self, like: kvplan.KVLayout, shared: str | None) -> kvplan.KVLayout:
        """A pool of all layers and heads."""
        scale = self.scale
        return kvplan.allocate(POOL_ORDER, like=like, layers=range(scale.layers), heads=range(scale.heads),
                               shared=shared)  # fmt: skip

    def program(self, step: str, mine: kvplan.KVLayout, pool: kvplan.KVLayout) -> Any:
        """This rank's part of a step: other ranks are described, and never touched."""
        parts = topologies(self.scale)[step]
        ranks = [mine if k == self.rank else self.elsewhere(part) for k, part in enumerate(parts)]
        if step.startswith("store"):
            return kvplan.reshard(ranks, pool)[self.rank, 0]
        return kvplan.reshard(pool, ranks)[0, self.rank]

    def rates(self, plan: kvplan.Plan) -> list[float]:
        """GB/s of whole transfers, one after the other."""
        if self.device != "cpu":
            self.torch.cuda.synchronize()  # what fills the caches; transfers do not wait for it
        made = []
        for _ in range(self.scale.times):
            start = time.perf_counter()
            self.path = self.executor.submit(plan).result().path
            made.append(plan.nbytes / (time.perf_counter() - start) / 1e9)
        return made

    def compare(self, part: Part, tensors: list[Any]) -> None:
        """Every byte of the rank's tensors is what it must be."""
        for layer, tensor in zip(part.layers, tensors, strict=True):
            wrong = int((tensor != self.content(layer, part.heads)).sum())
            if wrong:
                raise AssertionError(f"rank {self.rank}, layer {layer}: {wrong} elements are wrong")


def middle(rates: list[float]) -> float:
    """Median of all but the first and the last."""
    return statistics.median(rates[1:-1])


def work(rank: int, scale: Scale, shared: str, device: str, barrier: Barrier, pipe: Connection) -> None:
    """Run all steps of one process; send ``{step: Measured}``, or the error."""
    try:
        worker = Worker(rank, scale, shared, device)
        pipe.send(steps(worker, lambda: barrier.wait(PATIENCE)))
    except BaseException as error:
        barrier.abort()
        pipe.send(f"rank {rank}: {type(error).__name__}: {error}")
        raise


def steps(worker: Worker, meet: Callable[[], Any]) -> dict[str, Measured]:
    """Store, load as one, load as two; between steps all ranks meet."""
    measured: dict[str, Measured] = {}
    ids = list(range(worker.scale.blocks))
    back = ids[::-1]
    keeper = None
    for step, parts in topologies(worker.scale).items():
        takes_part = worker.rank < len(parts)
        store = step.startswith("store")
        if takes_part:
            part = parts[worker.rank]
            tensors = worker.cache(part, filled=store)
            layout = worker.layout(part, tensors)
            pool = keeper = worker.pool(layout, worker.shared)
            order = (ids, back) if store else (back, ids)  # block b of the ranks is at -1 - b of the pool
            plan = worker.program(step, layout, pool).plan(*order)
            own_name = f"{worker.shared}-{worker.rank}"
            owned = {name: worker.pool(layout, shared) for name, shared in (("anonymous", None), ("own", own_name))}
            plans = {name: worker.program(step, layout, each).plan(*order) for name, each in owned.items()}
            for each in owned.values():
                each.tensors.zero_()  # no first touch of a page is in a figure
            if store and worker.rank == 0:
                pool.tensors.zero_()
        meet()
        alone: list[float] = []
        alones: dict[str, float] = {}
        for turn in range(RANKS):  # one after the other, each alone
            if takes_part and turn == worker.rank:
                alones = {name: middle(worker.rates(each)) for name, each in plans.items()}
                alone = worker.rates(plan)
            meet()
        if takes_part and store and worker.rank == 0:  # what comes now is what will be loaded
            pool.tensors.zero_()
        meet()
        if takes_part:
            if not store:
                for tensor in tensors:
                    tensor.fill_(-1)
            beside = worker.rates(plan)
            if not store:
                worker.compare(part, tensors)
            detail = {"path": worker.path, "alone": alone, "beside": beside}
            measured[step] = Measured(**alones, alone=middle(alone), beside=middle(beside), detail=detail)
            del plan, plans, owned, pool, layout, tensors, each
        meet()  # no rank loads before all have stored
    del keeper
    worker.executor.close()
    return measured


def rows_of(answers: Sequence[dict[str, Measured]]) -> list[Row]:
    """A row for each rank of each step."""
    rows = []
    for rank, measured in enumerate(answers):
        for step, rates in measured.items():
            beside = {"own pool, alone": rates.own, "shared, alone": rates.alone, "anonymous, alone": rates.anonymous}
            rows.append(Row("ranks", f"{step}, rank {rank}", "GB/s", rates.beside, beside, SHARE * rates.own,
                            f"{SHARE:g} x own pool, alone", more_is_better=True, detail=rates.detail))  # fmt: skip
    return sorted(rows, key=lambda row: row.what.split(",")[0] != "store")


def measure(scale: Scale, shared: str, device: str) -> list[Row]:
    """Start the processes, and gather what they measured.

    Raises:
        RuntimeError: an error of one of them.
    """
    spawn = get_context("spawn")
    barrier = spawn.Barrier(RANKS)
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=work, args=(rank, scale, shared, device, barrier, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers = []
    for rank, pipe in enumerate(pipes):
        try:
            answers.append(pipe.recv() if pipe.poll(PATIENCE) else f"rank {rank} does not answer")
        except EOFError:
            answers.append(f"rank {rank} ended without an answer")
    for process in processes:
        process.join(PATIENCE)
    failed = [answer for answer in answers if isinstance(answer, str)]
    if failed:
        raise RuntimeError("; ".join(failed))
    return rows_of(answers)


def fitting(scale: Scale, folder: Path) -> Scale:
    """The scale with the blocks that fit into three quarters of the free space for the pools: one each, and one shared.

    Raises:
        RuntimeError: room for less than 16 blocks.
    """
    from dataclasses import replace

    room = shutil.disk_usage(folder).free * 3 // 4 // (RANKS + 1) // scale.block_nbytes
    if room < min(16, scale.blocks):
        raise RuntimeError(f"{folder} has room for {room} blocks of {scale.block_nbytes} bytes; name another by --pool")
    return replace(scale, blocks=min(scale.blocks, room))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where every limit holds, 1 where one does not, 2 for usage or too few GPUs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ranks", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny: shows that it runs, and nothing else")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the host path, to try it out")
    parser.add_argument("--pool", default=f"kvplan-ranks-{os.getpid()}", help="name or path of the shared pool")
    parser.add_argument("--output", type=Path, help="JSON file; by default in benchmarks/results, none for --smoke")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault(CONNECTIONS, MOST_CONNECTIONS)
    started = machine()
    about: dict[str, Any] = {}
    if chosen.device == "cuda":
        import torch

        if torch.cuda.device_count() < RANKS:
            print(f"{torch.cuda.device_count()} CUDA devices: these benchmarks need {RANKS}", file=sys.stderr)
            return 2
        about = gpu() | {"devices": RANKS}
    folder = Path(chosen.pool).parent if "/" in chosen.pool else Path("/dev/shm")  # noqa: S108  # where names are kept
    scale = fitting(SMOKE if chosen.smoke else Scale(), folder)
    rows = measure(scale, chosen.pool, chosen.device)
    print(table(rows))
    output = chosen.output or (
        None if chosen.smoke or chosen.device == "cpu" else default_path(about["name"], ["ranks"])
    )
    if output is not None:
        save(output, gpu_document(rows, scale=scale, started=started, about=about, failed={}))
    return 0 if chosen.smoke or all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
