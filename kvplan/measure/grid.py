"""The grid of a bench: its measurements and their order."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from kvplan.base.numbers import rounded
from kvplan.cost.policy import GPU_PATHS, PEER_ROUTES
from kvplan.errors import KVPlanError
from kvplan.measure import baselines, processes
from kvplan.measure.rows import IDLE, ON_DEVICE, ON_PEER, named, where
from kvplan.measure.workload import DIRECTIONS, HOSTS, WORD, Geometry

KIB, MIB = 1 << 10, 1 << 20
SIZES = (512, 2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, MIB)
COUNTS = (16, 1024, 65536)
EQUAL_NBYTES = 32 * MIB  # of the transfers that a plot compares
KINDS = ("decode", "prefill")
MOST_BLOCK_RUNS = 64
WHOLE = 0  # a count that stands for as many whole blocks as the memory holds
# Between GPUs: blocks of 80 layers, which have K and V. The largest transfers take milliseconds, as large copies do.
PEER_BLOCK_RUNS = 160
PEER_SIZES = (512, 2 * KIB, 8 * KIB, 64 * KIB, MIB)
PEER_COUNTS = (PEER_BLOCK_RUNS, WHOLE)
PEER_NBYTES, PEER_BESIDE_NBYTES = 1024 * MIB, 640 * MIB
# Beside compute, all paths move the same blocks: some hundred blocks of a model with runs of 8 KiB.
BESIDE_RUN_NBYTES, BESIDE_NBYTES, BESIDE_BLOCK_RUNS = 8 * KIB, 64 * MIB, 32
# Between processes. The ways of the CPU take turns on three buffers, which together are far larger than its caches.
PROCESS, PROCESS_SIZES, PROCESS_NBYTES, PROCESS_HOST_NBYTES = "process", PEER_SIZES[1:], 320 * MIB, 512 * MIB
HOST, ONE_THREAD, ONE = "host", "host on 1 thread", "one process"
# The ways of an executor of this process, each with the path of its policy.
OURS = {HOST: HOST, ONE_THREAD: HOST, ONE: "auto", **{path: path for path in ("auto", *GPU_PATHS)}}


def paths_of(device: str, peer: str | None = None) -> tuple[str, ...]:
    """Return the names of all paths, then of all baselines, of a device and its peer; see :class:`Bench`.

    >>> paths_of("cpu")
    ('host', 'host on 1 thread', 'numpy memcpy', 'torch indexing')
    >>> paths_of("cuda:0", "cuda:0")[:4]
    ('auto', 'copy_engine', 'copy_engine_2d', 'kernel')
    >>> paths_of("cpu", "process")
    ('two processes', 'one process', 'numpy memcpy', 'NIXL READ', 'NIXL WRITE')
    """
    if peer is not None and peer.startswith(PROCESS):
        pieces = (baselines.MEMCPY,) if device == "cpu" else (baselines.COPY, baselines.BATCH)
        return processes.TWO, ONE, *pieces, *processes.NIXL.values()
    ours = (HOST, ONE_THREAD) if device == "cpu" else ("auto", *GPU_PATHS)
    return *(path for path in ours if peer is None or path != "staged"), *baselines.names(device, peer)


def usual(device: str, peer: str | None = None, *, quick: bool = False) -> dict[str, Any]:
    """Return the arguments of :class:`Bench` that suit a device and its peer.

    Args:
        device, peer: see :class:`Bench`.
        quick: whether the bench is to take some seconds only.

    >>> usual("cuda:0", "cuda:1")["directions"], usual("cuda:0", "cuda:0")["directions"]
    (('push', 'pull'), ('device',))
    """
    chosen: dict[str, Any] = {"beside": () if device == "cpu" else KINDS}
    if quick:
        chosen |= {"sizes": (4 * KIB, 64 * KIB), "counts": (1024,), "beside": chosen["beside"][:1], "seconds": 5.0,
                   "most_nbytes": 64 * MIB}  # fmt: skip
    if peer is None:
        return chosen
    chosen |= {"peer": peer, "directions": routes_of(device, peer), "counts": (WHOLE,)}
    if peer.startswith(PROCESS):
        sizes, nbytes = (PROCESS_SIZES[:3], PROCESS_HOST_NBYTES) if device == "cpu" else (PROCESS_SIZES, PROCESS_NBYTES)
        few = {"sizes": PROCESS_SIZES[1:3], "most_nbytes": 64 * MIB, "seconds": 30.0}
        most = {"sizes": sizes, "most_nbytes": nbytes, "seconds": 120.0}
        return chosen | (few if quick else most) | {"hosts": HOSTS[:1], "beside": ()}
    few = {"sizes": (8 * KIB, 64 * KIB), "hosts": HOSTS[1:], "most_nbytes": 256 * MIB}
    chosen |= few if quick else {"sizes": PEER_SIZES, "counts": PEER_COUNTS, "most_nbytes": PEER_NBYTES}
    return chosen | {"beside_on": (ON_DEVICE,) if peer == device else (ON_DEVICE, ON_PEER)}


def routes_of(device: str, peer: str | None) -> tuple[str, ...]:
    """Return the routes that a bench of a device, or of a GPU and its peer, may measure.

    >>> routes_of("cuda:0", None), routes_of("cuda:0", "cuda:1"), routes_of("cuda:0", "cuda:0")
    (('load', 'store'), ('push', 'pull'), ('device',))
    """
    if peer is None:
        return DIRECTIONS
    return ("device",) if peer == device else PEER_ROUTES


@dataclass(frozen=True)
class Bench:
    """The measurements of a bench.

    Attributes:
        device: ``"cuda:N"``; or ``"cpu"``, with both sides in CPU memory and no measurement beside compute.
        sizes: bytes per run.
        counts: runs per transfer; 0 for as many whole blocks as ``most_nbytes`` holds.
        equal_nbytes: bytes of a further transfer of every size, if it fits; 0 for none.
        directions, hosts: see :class:`kvplan.measure.workload.Geometry`.
        paths: names of paths and baselines; empty for all.
        beside: kinds of compute.
        seconds: time in seconds after which no measurement begins.
        most_nbytes: most bytes per transfer; up to four times as much memory is allocated, half of it pinned.
        peer: the GPU that holds the pool, ``"cuda:M"``, or ``device`` itself; None for a pool in host memory. With
            ``"process:cuda:M"`` another process holds it; its GPU has this process's number. ``"process"`` stands for
            another process with the device itself, which may be ``"cpu"``.
        beside_on: where compute runs: on the ``"device"``, which runs the transfers, or on its ``"peer"``.

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
    peer: str | None = None
    beside_on: tuple[str, ...] = (ON_DEVICE,)
    equal_nbytes: int = 0

    def __post_init__(self) -> None:
        pair = {self.device, self.pool}
        if self.pool is not None and "cpu" in pair and not (self.process and len(pair) == 1):
            words = f"device {self.device!r}, peer {self.pool!r}; expected two GPUs"
            raise KVPlanError(f"{words}, such as device 'cuda:0', peer 'cuda:1'; of two processes, the CPU twice also")
        for field in ("sizes", "counts", "directions", "hosts", "beside_on"):
            if not getattr(self, field):
                raise KVPlanError(f"{field} is empty: there is nothing to measure; give some, or leave it out")
        for size in self.sizes:
            if size < WORD or size % WORD:
                raise KVPlanError(f"runs of {size} bytes; give a multiple of {WORD}")
        for count in self.counts:
            if count != WHOLE:
                block_runs_of(count)
        apart = self.peer not in (None, self.device) and not self.process
        choices = (
            ("direction", self.directions, routes_of(self.device, self.peer)),
            ("host", self.hosts, HOSTS),
            (f"path on {self.device}", self.paths, paths_of(self.device, self.peer)),
            ("compute", self.beside, KINDS),
            ("GPU of compute", self.beside_on, (ON_DEVICE, ON_PEER) if apart else (ON_DEVICE,)),
        )
        for what, given, right in choices:
            if wrong := [name for name in given if name not in right]:
                raise KVPlanError(f"unknown {what} {wrong[0]!r}; expected one of {', '.join(right)}")
        if self.beside and (self.device == "cpu" or self.process):
            raise KVPlanError("only a GPU is measured beside compute; give a device such as cuda:0, or no compute")
        if not 0 < self.seconds < inf:
            raise KVPlanError(f"seconds is {self.seconds}; give a number above 0")
        if not any(self.fitting(size) for size in self.sizes):
            least = rounded(min(size * self.runs(size, count) for size in self.sizes for count in self.counts))
            raise KVPlanError(
                f"nothing fits into {rounded(self.most_nbytes)}; the smallest transfer asked for has {least}"
            )

    @property
    def process(self) -> bool:
        """Return whether another process has the pool."""
        return (self.peer or "").partition(":")[0] == PROCESS

    @property
    def pool(self) -> str | None:
        """Return the device that holds the pool; None for a pool of this process in host memory.

        >>> Bench("cpu").pool, Bench("cpu", peer="process", directions=("push",)).pool
        (None, 'cpu')
        """
        return (self.peer or "").partition(":")[2] or self.device if self.process else self.peer

    @property
    def asked(self) -> tuple[str, ...]:
        """Return the paths and baselines to measure, in the order of :func:`paths_of`."""
        known = paths_of(self.device, self.peer)
        return tuple(name for name in known if name in self.paths) or known

    @property
    def most_block_runs(self) -> int:
        """Return the most runs per block."""
        return MOST_BLOCK_RUNS if self.peer is None else PEER_BLOCK_RUNS

    def runs(self, size: int, count: int) -> int:
        """Return the runs of a transfer: the count, or for 0 those of as many whole blocks as fit, at least one."""
        unit = self.most_block_runs
        return count if count != WHOLE else max(self.most_nbytes // size // unit, 1) * unit

    def fitting(self, size: int) -> list[int]:
        """Return the numbers of runs of this size that fit into the memory, the largest first."""
        return sorted({runs for runs in self._all(size) if size * runs <= self.most_nbytes}, reverse=True)

    def too_large(self) -> list[tuple[int, int]]:
        """Return the transfers that do not fit into the memory, as (bytes per run, runs)."""
        return [(size, runs) for size in sorted(set(self.sizes)) for runs in sorted(self._all(size))
                if size * runs > self.most_nbytes]  # fmt: skip

    def _all(self, size: int) -> set[int]:
        equal = self.equal_nbytes // size // 2 * 2  # a block has K and V
        return {self.runs(size, count) for count in self.counts} | ({equal} if equal else set())


class Task(NamedTuple):
    """One geometry, measured alone or beside one kind of compute, which runs on one of two GPUs."""

    geometry: Geometry
    beside: str
    on: str = ON_DEVICE

    @property
    def name(self) -> str:
        """Return the task in words."""
        return named(self.geometry) + (f", beside {where(self.beside, self.on)}" if self.beside != IDLE else "")


def block_runs_of(
    runs: int, run_nbytes: int = 1, most_nbytes: int | None = None, most_runs: int = MOST_BLOCK_RUNS
) -> int:
    """Return the number of runs per block: the largest that makes whole blocks with K and V of each layer.

    Args:
        runs: runs of the transfer.
        run_nbytes: bytes per run.
        most_nbytes: bytes of a side, which has two blocks if possible: the runs of a single block would touch.
        most_runs: most runs per block.

    Raises:
        KVPlanError: an odd number of runs.

    >>> block_runs_of(16), block_runs_of(100), block_runs_of(65536), block_runs_of(64, 1 << 20, 64 << 20)
    (16, 50, 64, 32)
    """
    if runs < 2 or runs % 2:
        raise KVPlanError(f"{runs} runs; give an even number: a block has K and V of each layer")
    whole = [some for some in range(2, min(runs, most_runs) + 1, 2) if runs % some == 0]
    held = [some for some in whole if most_nbytes is None or 2 * some * run_nbytes <= most_nbytes]
    return max(held or whole[:1])


def tasks(bench: Bench) -> list[Task]:
    """Return the tasks of a bench, in an order that has all kinds of tasks from the start.

    Directions, hosts and kinds of compute alternate. Of each size, the largest count is first.
    """
    lines: list[list[Task]] = []
    sizes = sorted(set(bench.sizes))
    fitting = {size: bench.fitting(size) for size in (*sizes[::2], *sizes[1::2])}
    for direction in bench.directions:
        for host in bench.hosts:
            line = [Task(Geometry(direction, host, size, counts[rank],
                                  block_runs_of(counts[rank], size, bench.most_nbytes, bench.most_block_runs)), IDLE)
                    for rank in range(len(bench.counts) + bool(bench.equal_nbytes)) for size, counts in fitting.items()
                    if rank < len(counts)]  # fmt: skip
            lines.append(line)
    nbytes, block = ((BESIDE_NBYTES, BESIDE_BLOCK_RUNS) if bench.peer is None else
                     (PEER_BESIDE_NBYTES, PEER_BLOCK_RUNS))  # fmt: skip
    runs = max(min(nbytes, bench.most_nbytes) // BESIDE_RUN_NBYTES // block, 1) * block
    if runs * BESIDE_RUN_NBYTES <= bench.most_nbytes:
        some = [Task(Geometry(direction, bench.hosts[0], BESIDE_RUN_NBYTES, runs, block), kind, on)
                for kind in bench.beside for on in bench.beside_on for direction in bench.directions]  # fmt: skip
        lines.append(some)
    return [line[k] for k in range(max(map(len, lines))) for line in lines if k < len(line)]
