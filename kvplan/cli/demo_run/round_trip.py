"""Run the demo's round trip on the blocks of any cache, and the plain demo, which needs no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

from kvplan.cli.screen.printing import Tell
from kvplan.cost.policy import Policy
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import TransferResult
from kvplan.layout.kvlayout import KVLayout
from kvplan.memory.allocate import allocate
from kvplan.plan.copy_program import CopyProgram, compile  # noqa: A004
from kvplan.plan.plan import join

POOL_NOTATION = "block layer kv token head dim"
POOL_BLOCK_TOKENS = 64
DESTROYED = 0xFF  # four of these bytes are a NaN in float32
REPEATS = 9

Tamper = Callable[[KVLayout], None]


class DemoError(RuntimeError):
    """The demo cannot run to its end."""


class MissingError(DemoError):
    """The engine that was named is not installed."""


@dataclass(frozen=True)
class Workload:
    """Size of the demo. All randomness comes from ``seed``.

    Attributes:
        requests: number of requests that run at once.
        new_tokens: tokens that each request generates.
        page_tokens: tokens per block of the cache.
        speed_nbytes: bytes of the timed copy; with 0 there is no timed copy.
        threads: CPU threads of every copy.
        tamper: a function that gets the pool between store and load, so that tests can make the demo fail.
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
        """Return the number of tokens that every request generates before the engine is paused."""
        return max(1, self.new_tokens // 8)

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return random token ids. Prompts have different lengths, so that most requests end inside a block."""
        random = np.random.default_rng(self.seed)
        lengths = random.integers(2 * self.page_tokens, 9 * self.page_tokens, self.requests)
        return [random.integers(0, vocabulary, length).tolist() for length in lengths]


@dataclass(frozen=True)
class Move:
    """One request that moves through the pool.

    Attributes:
        request: name of the request.
        cached_tokens: tokens whose keys and values the cache holds.
        old, host, new: block ids in the cache, in the pool, and in the cache again.
        generated: tokens that the request had generated when it was interrupted.
    """

    request: str
    cached_tokens: int
    old: list[int]
    host: list[int]
    new: list[int]
    generated: int = 0


@dataclass(frozen=True)
class RoundTrip:
    """Blocks that were stored, destroyed and loaded elsewhere.

    Attributes:
        store: the program from cache to pool.
        moves: one move for each request.
        units: units that were moved each way.
        rows: rows of one (layer, part, token, head) that were moved each way: the copies without any merging.
        descriptors: contiguous copies of the plan, after merging.
        stored, loaded: results of the two transfers; ``loaded`` is None if the load was left out.
        destroyed: whether every byte of the old blocks was overwritten.
    """

    store: CopyProgram
    moves: list[Move]
    units: int
    rows: int
    descriptors: int
    stored: TransferResult
    loaded: TransferResult | None
    destroyed: bool


@dataclass(frozen=True)
class Speed:
    """Best times of a large copy by the same program, and of a memcpy of equal size and threads."""

    nbytes: int
    units: int
    threads: int
    repeats: int
    kvplan_seconds: float
    memcpy_seconds: float


@dataclass(frozen=True)
class Outcome:
    """Results of the demo.

    Attributes:
        engine: ``"transformers"``, ``"torch"`` or ``"numpy"``.
        compared: text that names the data that was compared with the undisturbed run: tokens or bytes.
        equal: whether each request gave the same result.
        control_changed: number of requests that changed without the load; None without a control run.
        model: facts of the model; empty without an engine.
        speed: times of a large copy; None if it was left out.
    """

    engine: str
    versions: dict[str, str]
    model: dict[str, Any]
    new_tokens: int
    trip: RoundTrip
    compared: str
    equal: dict[str, bool]
    control_changed: int | None
    speed: Speed | None

    @property
    def passed(self) -> bool:
        """Return whether every request gave the same result, the old blocks were destroyed, and the control changed."""
        return all(self.equal.values()) and self.trip.destroyed and self.control_changed != 0


def round_trip(
    cache: KVLayout, block_bytes: Any, moves: Sequence[Move], workload: Workload, *, load: bool = True
) -> RoundTrip:
    """Store the old blocks of every request, overwrite them, and load the new blocks.

    Args:
        cache: the layout of the cache.
        block_bytes: (block, byte) uint8 numpy view of the same memory, made without kvplan.
        moves: moves with ``old`` and ``new`` ids; this function adds the ``host`` ids.
        workload: threads, and the function to call between store and load.
        load: whether to load; without a load, the new blocks keep their content.
    """
    host_blocks = [ceil(len(move.old) * cache.block_tokens / POOL_BLOCK_TOKENS) for move in moves]
    pool = allocate(POOL_NOTATION, like=cache, num_blocks=sum(host_blocks), block_tokens=POOL_BLOCK_TOKENS, pin=False)
    ids: Iterator[int] = iter(range(sum(host_blocks)))
    moves = [replace(move, host=[next(ids) for _ in range(n)]) for move, n in zip(moves, host_blocks, strict=True)]
    store, restore = compile(cache, pool), compile(pool, cache)
    with Executor(device="cpu", policy=Policy(threads=workload.threads)) as executor:
        plan = join([store.plan(move.old, move.host) for move in moves])
        stored = executor.submit(plan).result()
        old = np.concatenate([move.old for move in moves])
        block_bytes[old] = DESTROYED
        destroyed = bool((block_bytes[old] == DESTROYED).all())
        if workload.tamper is not None:
            workload.tamper(pool)
        loaded = None
        if load:
            loaded = executor.submit(join([restore.plan(move.host, move.new) for move in moves])).result()
    rows = plan.units * store.unit_tokens * len(cache.heads) * len(cache.layers) * len(cache.parts)
    return RoundTrip(store, moves, plan.units, rows, len(plan.descriptors().size), stored, loaded, destroyed)


def measure_speed(trip: RoundTrip, workload: Workload) -> Speed | None:
    """Time the same program on larger caches, whose blocks move in random order."""
    if not workload.speed_nbytes:
        return None
    cache, pool = trip.store.src, trip.store.dst
    host_blocks = max(1, workload.speed_nbytes // pool.block_nbytes)
    blocks = host_blocks * (pool.block_tokens // cache.block_tokens)
    counts = ((cache, {"block": blocks}), (pool, {"block": host_blocks}))
    shapes = [[(one.sizes | count)[axis] for axis in one.notation.split()] for one, count in counts]
    arrays = [np.ones(shape, cache.dtype) for shape in shapes]  # ones: every page is allocated before the timing
    large = [KVLayout.from_tensors(one.notation, array) for (one, _), array in zip(counts, arrays, strict=True)]
    random = np.random.default_rng(workload.seed)
    plan = compile(*large).plan(random.permutation(blocks), random.permutation(host_blocks))
    source, destination = (array.reshape(-1).view(np.uint8) for array in arrays)
    cuts = np.linspace(0, source.size, workload.threads + 1).astype(int)
    seconds = []
    with (
        Executor(device="cpu", policy=Policy(threads=workload.threads)) as executor,
        ThreadPoolExecutor(workload.threads) as threads,
    ):
        for _ in range(REPEATS + 1):  # the first warms up
            start = perf_counter()
            executor.submit(plan).synchronize()
            between = perf_counter()
            list(threads.map(lambda a, b: np.copyto(destination[a:b], source[a:b]), cuts[:-1], cuts[1:]))
            seconds.append((between - start, perf_counter() - between))
    ours, plain = (min(times[1:]) for times in zip(*seconds, strict=True))
    return Speed(plan.nbytes, plan.units, workload.threads, REPEATS, ours, plain)


def run(workload: Workload, tell: Tell, *, framework: str) -> Outcome:
    """Run the round trip without an engine: the content of the cache is random, and compared byte by byte.

    Args:
        workload: size of the demo.
        tell: a function that gets the share that is done and a text.
        framework: ``"torch"`` or ``"numpy"``, which makes the tensor of the cache.

    Raises:
        ImportError: torch is not installed.
    """
    tell(None, f"Filling a cache of plain {framework} tensors")
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
    trip = round_trip(KVLayout.from_tensors(POOL_NOTATION, tensor), block_bytes, moves, workload)
    equal = {move.request: bool((content[move.new] == undisturbed[move.old]).all()) for move in trip.moves}
    speed = measure_speed(trip, workload)
    return Outcome(framework, versions, {}, 0, trip, "bytes of the cache", equal, None, speed)
