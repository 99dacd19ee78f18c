"""The demo's round trip, on the blocks of any cache; and the plain demo, for machines without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

import kvplan
from kvplan.execute.host.tasks import TASK_NBYTES

POOL_NOTATION = "block layer kv token head dim"
POOL_BLOCK_TOKENS = 64
DESTROYED = 0xFF  # four such bytes are a NaN in float32
REPEATS = 9

Tamper = Callable[[kvplan.KVLayout], None]
Note = Callable[..., None]  # note(what is going on, done=, total=)


class DemoError(RuntimeError):
    """The demo could not be carried through."""


class MissingError(DemoError):
    """What was asked for by name is not installed."""


@dataclass(frozen=True)
class Workload:
    """What is asked of the demo; everything that is random comes from ``seed``.

    Attributes:
        requests: how many run at once.
        new_tokens: tokens that each generates.
        page_tokens: tokens of a block of the cache.
        speed_nbytes: bytes of the timed copy.
        threads: CPU threads of every copy.
        tamper: called with the pool between store and load: tests show with it that the demo can fail.
    """

    requests: int
    new_tokens: int
    speed_nbytes: int
    threads: int
    page_tokens: int = 16
    seed: int = 0
    tamper: Tamper | None = None

    @property
    def pause_after(self) -> int:
        """Tokens that every request has generated before the engine is paused."""
        return max(1, self.new_tokens // 8)

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Token ids: of different lengths, so that most requests end inside a block."""
        random = np.random.default_rng(self.seed)
        lengths = random.integers(2 * self.page_tokens, 9 * self.page_tokens, self.requests)
        return [random.integers(0, vocabulary, length).tolist() for length in lengths]


@dataclass(frozen=True)
class Move:
    """One request on its way through the pool.

    Attributes:
        request: its name.
        cached_tokens: tokens whose keys and values the cache holds.
        old, host, new: block ids in the cache, in the pool, and in the cache again.
        generated: tokens it had generated when it was interrupted.
    """

    request: str
    cached_tokens: int
    old: list[int]
    host: list[int]
    new: list[int]
    generated: int = 0


@dataclass(frozen=True)
class RoundTrip:
    """What was stored, destroyed and loaded elsewhere.

    Attributes:
        store: the program from cache to pool.
        moves: one a request.
        units: units moved, each way.
        rows: rows of one (layer, part, token, head) moved, each way: the copies before anything is merged.
        descriptors: contiguous copies of the plan, after merging.
        stored, loaded: results of the two transfers; None where nothing was loaded.
        destroyed: whether every byte of the old blocks was seen overwritten.
    """

    store: kvplan.CopyProgram
    moves: list[Move]
    units: int
    rows: int
    descriptors: int
    stored: kvplan.TransferResult
    loaded: kvplan.TransferResult | None
    destroyed: bool


@dataclass(frozen=True)
class Speed:
    """A large copy of the same program, and a plain memcpy of as many bytes with as many threads; best of repeats."""

    nbytes: int
    units: int
    threads: int
    repeats: int
    kvplan_seconds: float
    memcpy_seconds: float


@dataclass(frozen=True)
class Outcome:
    """All that the demo found out.

    Attributes:
        engine: ``"transformers"``, ``"torch"`` or ``"numpy"``.
        compared: what was compared with the undisturbed run.
        equal: request by request, whether it was the same.
        control_changed: requests that came out different where the load was left out; None where there is no control.
        model: facts of the model; empty without an engine.
    """

    engine: str
    versions: dict[str, str]
    model: dict[str, Any]
    new_tokens: int
    trip: RoundTrip
    compared: str
    equal: dict[str, bool]
    control_changed: int | None
    speed: Speed

    @property
    def passed(self) -> bool:
        """Whether the demo shows what it is meant to."""
        return all(self.equal.values()) and self.trip.destroyed and self.control_changed != 0


def round_trip(
    cache: kvplan.KVLayout, block_bytes: Any, moves: Sequence[Move], workload: Workload, *, load: bool = True
) -> RoundTrip:
    """Store the old blocks of every request, overwrite them, and load the new blocks.

    Args:
        cache: the layout of the cache.
        block_bytes: (block, byte) uint8 numpy view of the same memory, which kvplan has no part in.
        moves: with ``old`` and ``new`` ids; ``host`` ids are filled in.
        workload: threads, and the hook between store and load.
        load: False leaves the load out, so that the new blocks stay as they are.
    """
    host_blocks = [ceil(len(move.old) * cache.block_tokens / POOL_BLOCK_TOKENS) for move in moves]
    pool = kvplan.allocate(
        POOL_NOTATION, like=cache, num_blocks=sum(host_blocks), block_tokens=POOL_BLOCK_TOKENS, pin=False
    )
    ids: Iterator[int] = iter(range(sum(host_blocks)))
    moves = [replace(move, host=[next(ids) for _ in range(n)]) for move, n in zip(moves, host_blocks, strict=True)]
    store, restore = kvplan.compile(cache, pool), kvplan.compile(pool, cache)
    with kvplan.Executor(device="cpu", policy=kvplan.Policy(threads=workload.threads)) as executor:
        plan = kvplan.join([store.plan(move.old, move.host) for move in moves])
        stored = executor.submit(plan).result()
        old = np.concatenate([move.old for move in moves])
        block_bytes[old] = DESTROYED
        destroyed = bool((block_bytes[old] == DESTROYED).all())
        if workload.tamper is not None:
            workload.tamper(pool)
        loaded = None
        if load:
            loaded = executor.submit(kvplan.join([restore.plan(move.host, move.new) for move in moves])).result()
    rows = plan.units * store.unit_tokens * len(cache.heads) * len(cache.layers) * len(cache.parts)
    return RoundTrip(store, moves, plan.units, rows, len(plan.descriptors().size), stored, loaded, destroyed)


def measure_speed(trip: RoundTrip, workload: Workload, note: Note) -> Speed:
    """Time the same program on caches large enough to leave the CPU's caches, blocks in random order."""
    cache, pool = trip.store.src, trip.store.dst
    per_host_block = pool.block_tokens // cache.block_tokens
    host_blocks = max(1, workload.speed_nbytes // pool.block_nbytes)
    blocks = host_blocks * per_host_block
    counts = ((cache, {"block": blocks}), (pool, {"block": host_blocks}))
    shapes = [[(layout.sizes | count)[axis] for axis in layout.notation.split()] for layout, count in counts]
    arrays = [np.ones(shape, cache.dtype) for shape in shapes]  # ones: every page is there before the clock runs
    large = [
        kvplan.KVLayout.from_tensors(layout.notation, array) for (layout, _), array in zip(counts, arrays, strict=True)
    ]
    random = np.random.default_rng(workload.seed)
    plan = kvplan.compile(*large).plan(random.permutation(blocks), random.permutation(host_blocks))
    source, destination = (array.reshape(-1).view(np.uint8) for array in arrays)
    # One piece a thread is what memcpy likes best; small pieces suffer less where other programs want the cores too.
    pieces = (workload.threads, max(workload.threads, source.size // TASK_NBYTES))
    cuts = [np.linspace(0, source.size, count + 1).astype(int) for count in pieces]
    ours, plain = [], []
    with (
        kvplan.Executor(device="cpu", policy=kvplan.Policy(threads=workload.threads)) as executor,
        ThreadPoolExecutor(workload.threads) as threads,
    ):
        for k in range(REPEATS + 1):  # the first of each warms up
            note("Timing a large copy", done=k, total=REPEATS + 1)
            start = perf_counter()  # both by the wall clock, hand-off to the threads included
            executor.submit(plan).synchronize()
            ours.append(perf_counter() - start)
            for cut in cuts:
                start = perf_counter()
                list(threads.map(lambda a, b: np.copyto(destination[a:b], source[a:b]), cut[:-1], cut[1:]))
                plain.append(perf_counter() - start)
    return Speed(plan.nbytes, plan.units, workload.threads, REPEATS, min(ours[1:]), min(plain[len(cuts) :]))


def run(workload: Workload, note: Note, *, framework: str) -> Outcome:
    """The same round trip without an engine: the content of the cache is random, and compared byte by byte.

    Args:
        workload: what is asked.
        note: told what is going on.
        framework: ``"torch"`` or ``"numpy"``, whose tensor is the cache.

    Raises:
        ImportError: there is no torch.
    """
    note(f"Filling a cache of plain {framework} tensors")
    prompts = workload.prompts(vocabulary=2)
    lengths = [len(prompt) + workload.pause_after for prompt in prompts]
    needed = [ceil(length / workload.page_tokens) for length in lengths]
    random = np.random.default_rng(workload.seed)
    shape = (2 * sum(needed), 4, 2, workload.page_tokens, 4, 32)
    content = random.standard_normal(shape, dtype=np.float32)
    tensor: Any = content
    versions = {"numpy": np.__version__}
    if framework == "torch":
        import torch

        tensor, versions = torch.from_numpy(content), {"torch": str(torch.__version__), **versions}
    undisturbed = content.copy()
    ids = random.permutation(shape[0]).tolist()
    moves, at = [], 0
    for k, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        old, new = ids[at : at + count], ids[sum(needed) + at : sum(needed) + at + count]
        moves.append(Move(f"request {k}", length, old, [], new))
        at += count
    block_bytes = content.reshape(shape[0], -1).view(np.uint8)
    trip = round_trip(kvplan.KVLayout.from_tensors(POOL_NOTATION, tensor), block_bytes, moves, workload)
    equal = {move.request: bool((content[move.new] == undisturbed[move.old]).all()) for move in trip.moves}
    speed = measure_speed(trip, workload, note)
    return Outcome(framework, versions, {}, 0, trip, "bytes of the cache", equal, None, speed)
