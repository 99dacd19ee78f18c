"""The grid of a bench: its measurements and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from kvplan.base.numbers import spelled
from kvplan.cost.policy import GPU_PATHS
from kvplan.errors import KVPlanError
from kvplan.measure import baselines
from kvplan.measure.rows import IDLE, named
from kvplan.measure.workload import DIRECTIONS, HOSTS, WORD, Geometry

KIB, MIB = 1 << 10, 1 << 20
SIZES = (512, 2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, MIB)
COUNTS = (16, 1024, 65536)
KINDS = ("decode", "prefill")
MOST_BLOCK_RUNS = 64
# Beside compute, all paths move the same blocks: some hundred blocks of a model with runs of 8 KiB.
BESIDE_RUN_NBYTES, BESIDE_NBYTES, BESIDE_BLOCK_RUNS = 8 * KIB, 64 * MIB, 32
HOST, ONE_THREAD = "host", "host on 1 thread"


def paths_of(device: str) -> tuple[str, ...]:
    """Return the names of all paths, then of all baselines, of a device.

    >>> paths_of("cpu")
    ('host', 'host on 1 thread', 'numpy memcpy', 'torch indexing')
    """
    ours = (HOST, ONE_THREAD) if device == "cpu" else ("auto", *GPU_PATHS)
    return *ours, *baselines.names(device)


@dataclass(frozen=True)
class Bench:
    """The measurements of a bench.

    Attributes:
        device: ``"cuda:N"``; or ``"cpu"``, with both sides in CPU memory and no measurement beside compute.
        sizes: bytes per run.
        counts: runs per transfer.
        directions, hosts: see :class:`kvplan.measure.workload.Geometry`.
        paths: names of paths and baselines; empty for all.
        beside: kinds of compute.
        seconds: time in seconds after which no measurement begins.
        most_nbytes: most bytes per transfer; up to four times as much memory is allocated, half of it pinned.

    Raises:
        KVPlanError: an attribute is wrong; the message names it, and what would be right.

    >>> Bench("cpu", sizes=(100,))
    Traceback (most recent call last):
    kvplan.errors.KVPlanError: runs of 100 bytes; give a multiple of 8
    """

    device: str = "cuda:0"
    sizes: tuple[int, ...] = SIZES
    counts: tuple[int, ...] = COUNTS
    directions: tuple[str, ...] = DIRECTIONS
    hosts: tuple[str, ...] = HOSTS
    paths: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    seconds: float = 60.0
    most_nbytes: int = 256 * MIB

    def __post_init__(self) -> None:
        for what in ("sizes", "counts", "directions", "hosts"):
            if not getattr(self, what):
                raise KVPlanError(f"{what} is empty: there is nothing to measure; give some, or leave it out")
        for size in self.sizes:
            if size < WORD or size % WORD:
                raise KVPlanError(f"runs of {size} bytes; give a multiple of {WORD}")
        for count in self.counts:
            block_runs_of(count)
        known = paths_of(self.device)
        for what, given, right in (
            ("direction", self.directions, DIRECTIONS),
            ("host", self.hosts, HOSTS),
            (f"path on {self.device}", self.paths, known),
            ("compute", self.beside, KINDS),
        ):
            for one in given:
                if one not in right:
                    raise KVPlanError(f"unknown {what} {one!r}; expected one of {', '.join(right)}")
        if self.beside and self.device == "cpu":
            raise KVPlanError("only a GPU is measured beside compute; give a device such as cuda:0, or no compute")
        if not 0 < self.seconds < inf:
            raise KVPlanError(f"seconds is {self.seconds}; give a number above 0")
        if not any(size * count <= self.most_nbytes for size in self.sizes for count in self.counts):
            least = spelled(min(self.sizes, default=0) * min(self.counts, default=0))
            raise KVPlanError(
                f"nothing fits into {spelled(self.most_nbytes)}; the smallest transfer asked for has {least}"
            )

    @property
    def asked(self) -> tuple[str, ...]:
        """Return the paths and baselines to measure, in the order of :func:`paths_of`."""
        return tuple(name for name in paths_of(self.device) if name in self.paths) or paths_of(self.device)


class Task(NamedTuple):
    """One geometry, measured alone or beside one kind of compute."""

    geometry: Geometry
    beside: str

    @property
    def name(self) -> str:
        """Return the task in words."""
        return named(self.geometry) + (f", beside {self.beside}" if self.beside != IDLE else "")


def block_runs_of(runs: int, run_nbytes: int = 1, most_nbytes: int | None = None) -> int:
    """Return the number of runs per block: the largest, up to 64, that makes whole blocks with K and V of each layer.

    Args:
        runs: runs of the transfer.
        run_nbytes: bytes per run.
        most_nbytes: bytes of a side, which has two blocks if possible: the runs of a single block would touch.

    Raises:
        KVPlanError: an odd number of runs.

    >>> block_runs_of(16), block_runs_of(100), block_runs_of(65536), block_runs_of(64, 1 << 20, 64 << 20)
    (16, 50, 64, 32)
    """
    if runs < 2 or runs % 2:
        raise KVPlanError(f"{runs} runs; give an even number: a block has K and V of each layer")
    whole = [some for some in range(2, min(runs, MOST_BLOCK_RUNS) + 1, 2) if runs % some == 0]
    held = [some for some in whole if most_nbytes is None or 2 * some * run_nbytes <= most_nbytes]
    return max(held or whole[:1])


def spread(items: Sequence[int]) -> list[int]:
    """Return the items in another order: first, last, then always the item farthest from all items before it.

    >>> spread([1, 2, 3, 4, 5])
    [1, 5, 3, 2, 4]
    """
    left, taken = list(range(len(items))), list[int]()
    while left:
        k = max(left, key=lambda k: min((abs(k - other) for other in taken), default=0))
        left.remove(k)
        taken.append(k)
    return [items[k] for k in taken]


def tasks(bench: Bench) -> list[Task]:
    """Return the tasks of a bench, in an order that has all kinds of tasks from the start.

    Directions, hosts and kinds of compute alternate. Of each size, the largest count is first.
    """
    lines: list[list[Task]] = []
    sizes = spread(sorted(set(bench.sizes)))
    fitting = {size: sorted({count for count in bench.counts if size * count <= bench.most_nbytes}, reverse=True)
               for size in sizes}  # fmt: skip
    for direction in bench.directions:
        for host in bench.hosts:
            line = [Task(Geometry(direction, host, size, counts[rank],
                                  block_runs_of(counts[rank], size, bench.most_nbytes)), IDLE)
                    for rank in range(len(bench.counts)) for size, counts in fitting.items()
                    if rank < len(counts)]  # fmt: skip
            lines.append(line)
    runs = max(min(BESIDE_NBYTES, bench.most_nbytes) // BESIDE_RUN_NBYTES // BESIDE_BLOCK_RUNS, 1) * BESIDE_BLOCK_RUNS
    if runs * BESIDE_RUN_NBYTES <= bench.most_nbytes:
        some = [Task(Geometry(direction, bench.hosts[0], BESIDE_RUN_NBYTES, runs, BESIDE_BLOCK_RUNS), kind)
                for kind in bench.beside for direction in bench.directions]  # fmt: skip
        lines.append(some)
    return [line[k] for k in range(max(map(len, lines))) for line in lines if k < len(line)]
