"""The bench: it times paths and baselines over sizes, counts, routes and pools, alone and beside compute.

A path or baseline is timed only after a comparison of every byte that it moved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import zip_longest
from math import inf
from typing import Any

from kvplan.base.numbers import rounded
from kvplan.cost.policy import BESIDE_KERNELS, GPU_PATHS, HOST_ROUTES, PEER_ROUTES, Policy
from kvplan.errors import HostMemoryError, KVPlanError, PathError
from kvplan.execute.executor import Executor
from kvplan.measure import workload
from kvplan.measure.processes import NIXL, TWO, other_process
from kvplan.measure.rig import KINDS, Compute, Line, Progress, aside, in_a_line, silent, timed, window
from kvplan.measure.rows import IDLE, ON_DEVICE, ON_PEER, Ceilings, Missing, Row, figures
from kvplan.measure.workload import BATCH, COPY, DIRECTIONS, HOSTS, MEMCPY, WORD, Baseline, Buffers, Maker, Work

KIB, MIB = 1 << 10, 1 << 20
WHOLE = 0  # a count that stands for as many whole blocks as the memory holds
SIZES, COUNTS = (512, 2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, MIB), (16, 1024, 65536)
EQUAL_NBYTES = 32 * MIB  # of the transfers that a plot compares
MOST_BLOCK_RUNS = 64
# Between GPUs: blocks of 80 layers, which have K and V. The largest transfers take milliseconds, as large copies do.
PEER_BLOCK_RUNS = 160
PEER_SIZES, PEER_COUNTS = (512, 2 * KIB, 8 * KIB, 64 * KIB, MIB), (PEER_BLOCK_RUNS, WHOLE)
PEER_NBYTES, PEER_BESIDE_NBYTES = 1024 * MIB, 640 * MIB
# Beside compute, all paths move the same blocks: some hundred blocks of a model with runs of 8 KiB.
BESIDE_RUN_NBYTES, BESIDE_NBYTES, BESIDE_BLOCK_RUNS = 8 * KIB, 64 * MIB, 32
# Between processes. The ways of the CPU take turns on three buffers, which together are far larger than its caches.
PROCESS, PROCESS_NBYTES, PROCESS_HOST_NBYTES = "process", 320 * MIB, 512 * MIB
HOST, ONE_THREAD, ONE = "host", "host on 1 thread", "one process"
# The ways of an executor of this process, each with the path of its policy.
OURS = {HOST: HOST, ONE_THREAD: HOST, ONE: "auto", **{path: path for path in ("auto", *GPU_PATHS)}}
PROGRAMS = (1, 2, 4, 8)  # numbers of Triton programs that are measured beside decode
PEER_PROGRAMS = (None, 4, 8, 16)  # the same between GPUs; None stands for the default of the policy
COPY_PATHS = ("copy_engine", "copy_engine_2d")
SAMPLES, CASE_SECONDS, WARM_UPS = 15, 0.02, 1
TRIES = 2  # measurements of a window in which compute ran out of work
DRY = "the queue of compute ran empty meanwhile"


def paths_of(device: str, peer: str | None = None) -> tuple[str, ...]:
    """Return the names of all paths, then of all baselines, of a device and its peer; see :class:`Bench`.

    >>> paths_of("cpu")
    ('host', 'host on 1 thread', 'numpy memcpy', 'torch indexing')
    >>> paths_of("cuda:0", "cuda:0")[:4]
    ('auto', 'copy_engine', 'copy_engine_2d', 'kernel')
    >>> paths_of("cpu", "process")
    ('two processes', 'one process', 'numpy memcpy', 'NIXL')
    """
    if peer is not None and peer.startswith(PROCESS):
        return TWO, ONE, *((MEMCPY,) if device == "cpu" else (COPY, BATCH)), NIXL
    ours = (HOST, ONE_THREAD) if device == "cpu" else ("auto", *GPU_PATHS)
    return *(path for path in ours if peer is None or path != "staged"), *workload.names(device, peer)


def routes_of(device: str, peer: str | None) -> tuple[str, ...]:
    """Return the routes that a bench of a device, or of a GPU and its peer, may measure.

    >>> routes_of("cuda:0", None), routes_of("cuda:0", "cuda:1"), routes_of("cuda:0", "cuda:0")
    (('load', 'store'), ('push', 'pull'), ('device',))
    """
    return DIRECTIONS if peer is None else ("device",) if peer == device else PEER_ROUTES


def usual(device: str, peer: str | None = None, *, quick: bool = False) -> dict[str, Any]:
    """Return the arguments of :class:`Bench` that suit a device and its peer.

    Args:
        device, peer: see :class:`Bench`.
        quick: whether the bench is to take some seconds only.

    >>> usual("cuda:0", "cuda:1")["directions"], usual("cuda:0", "cuda:0")["directions"]
    (('push', 'pull'), ('device',))
    """
    cpu = device == "cpu"
    few: dict[str, Any] = {"sizes": (4 * KIB, 64 * KIB), "counts": (1024,), "seconds": 5.0, "most_nbytes": 64 * MIB}
    beside = {"beside": () if cpu else tuple(KINDS)[: 1 if quick else None]}
    if peer is None:
        return (few if quick else {}) | beside
    routes = {"peer": peer, "directions": routes_of(device, peer)}
    if peer.startswith(PROCESS):
        few |= {"sizes": PEER_SIZES[2:4], "seconds": 30.0}
        many = {"sizes": PEER_SIZES[1 : 4 if cpu else None], "seconds": 120.0,
                "most_nbytes": PROCESS_HOST_NBYTES if cpu else PROCESS_NBYTES}  # fmt: skip
        return (few if quick else many) | routes | {"counts": (WHOLE,), "hosts": HOSTS[:1]}
    few |= {"sizes": (8 * KIB, 64 * KIB), "counts": (WHOLE,), "hosts": HOSTS[1:], "most_nbytes": 256 * MIB}
    many = {"sizes": PEER_SIZES, "counts": PEER_COUNTS, "most_nbytes": PEER_NBYTES}
    on = {"beside_on": (ON_DEVICE,) if peer == device else (ON_DEVICE, ON_PEER)}
    return (few if quick else many) | routes | beside | on


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
        device, pool = self.device, self.pool
        if pool is not None and "cpu" in (device, pool) and not (self.process and device == pool):
            words = f"device {device!r}, peer {pool!r}; expected two GPUs"
            raise KVPlanError(f"{words}, such as device 'cuda:0', peer 'cuda:1'; of two processes, the CPU twice also")
        for field in ("sizes", "counts", "directions", "hosts", "beside_on"):
            if not getattr(self, field):
                raise KVPlanError(f"{field} is empty: there is nothing to measure; give some, or leave it out")
        if odd := [size for size in self.sizes if size < WORD or size % WORD]:
            raise KVPlanError(f"runs of {odd[0]} bytes; give a multiple of {WORD}")
        if odd := [count for count in self.counts if count < 0 or count % 2]:
            raise KVPlanError(f"{odd[0]} runs; give an even number: a block has K and V of each layer")
        apart = self.peer not in (None, device) and not self.process
        choices = (
            ("direction", self.directions, routes_of(device, self.peer)),
            ("host", self.hosts, HOSTS),
            (f"path on {device}", self.paths, paths_of(device, self.peer)),
            ("compute", self.beside, tuple(KINDS)),
            ("GPU of compute", self.beside_on, (ON_DEVICE, ON_PEER) if apart else (ON_DEVICE,)),
        )
        for what, asked, right in choices:
            if wrong := [name for name in asked if name not in right]:
                raise KVPlanError(f"unknown {what} {wrong[0]!r}; expected one of {', '.join(right)}")
        if self.beside and (device == "cpu" or self.process):
            raise KVPlanError("only a GPU is measured beside compute; give a device such as cuda:0, or no compute")
        if not 0 < self.seconds < inf:
            raise KVPlanError(f"seconds is {self.seconds}; give a number above 0")
        if not any(self.fitting(size) for size in self.sizes):
            raise KVPlanError(f"nothing fits into {rounded(self.most_nbytes)}; give more memory, or smaller transfers")

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

    def counts_of(self, size: int) -> list[int]:
        """Return the numbers of runs of this size, the largest first."""
        unit = MOST_BLOCK_RUNS if self.peer is None else PEER_BLOCK_RUNS
        whole = max(self.most_nbytes // size // unit, 1) * unit
        equal = self.equal_nbytes // size // 2 * 2  # a block has K and V
        return sorted({*(whole if count == WHOLE else count for count in self.counts), equal} - {0}, reverse=True)

    def fitting(self, size: int) -> list[int]:
        """Return those that fit into the memory."""
        return [runs for runs in self.counts_of(size) if size * runs <= self.most_nbytes]

    def block_runs(self, size: int, runs: int) -> int:
        """Return the runs per block: the most that make whole blocks, of which a side has two if possible.

        The runs of a single block would touch.

        >>> bench = Bench("cpu")
        >>> [bench.block_runs(8, runs) for runs in (16, 100, 65536)], bench.block_runs(4 << 20, 64)
        ([16, 50, 64], 32)
        """
        most = min(runs, MOST_BLOCK_RUNS if self.peer is None else PEER_BLOCK_RUNS)
        whole = [some for some in range(2, most + 1, 2) if runs % some == 0]
        return max([some for some in whole if 2 * some * size <= self.most_nbytes] or whole[:1])

    def tasks(self) -> list[Row]:
        """Return rows without a path, in an order that has all kinds of tasks from the start.

        Directions, hosts and kinds of compute alternate. Of each size, the largest count is first.
        """
        sizes = sorted(set(self.sizes))
        lines = [
            [Row(direction, host, size, runs, self.block_runs(size, runs), "")
             for rank in range(len(self.counts) + 1) for size in (*sizes[::2], *sizes[1::2])
             for runs in self.fitting(size)[rank : rank + 1]]
            for direction in self.directions for host in self.hosts
        ]  # fmt: skip
        nbytes, block = ((BESIDE_NBYTES, BESIDE_BLOCK_RUNS) if self.peer is None else
                         (PEER_BESIDE_NBYTES, PEER_BLOCK_RUNS))  # fmt: skip
        runs = min(nbytes, self.most_nbytes) // BESIDE_RUN_NBYTES // block * block
        lines.append([Row(direction, self.hosts[0], BESIDE_RUN_NBYTES, runs, block, "", kind, beside_on=on)
                      for kind in self.beside for on in self.beside_on for direction in self.directions
                      if runs])  # fmt: skip
        return [task for tasks in zip_longest(*lines) for task in tasks if task]


class Run:
    """One run of a bench. :meth:`rows` measures, and sets the attributes.

    Args:
        bench: the measurements to make.
        progress: function that is called with the share that is done, and the step that begins.
        clock: function that returns seconds; tests replace it.

    Attributes:
        ceilings: the measured ceilings; None before the first row.
        processes: seconds of meetings and of one block, if another process has the pool.
        missing: measurements that were not made, and why.
    """

    def __init__(
        self, bench: Bench, progress: Progress = silent, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.bench, self.progress, self.clock = bench, progress, clock
        self.ceilings: Ceilings | None = None
        self.processes: dict[str, Any] = {}
        self.missing: list[Missing] = []
        self._makers: dict[str, Maker] = {}

    def rows(self) -> Iterator[Row]:
        """Measure all tasks, and yield a row for each measurement.

        Raises:
            KVPlanError: the device does not exist, or has too little memory; or processes cannot meet.
        """
        bench, until, todo = self.bench, self.clock() + self.bench.seconds, self.bench.tasks()
        self.missing += [Missing(f"{rounded(size)} x {runs:,}", f"more than {rounded(bench.most_nbytes)}")
                         for size in sorted(set(bench.sizes)) for runs in reversed(bench.counts_of(size))
                         if runs not in bench.fitting(size)]  # fmt: skip
        self.progress(0.0, "memory")
        with ExitStack() as stack:
            self._makers = {path: partial(_ours, stack.enter_context(_executor(bench.device, path)), path)
                            for path in bench.asked if path in OURS}  # fmt: skip
            line = Line(bench.device, bench.pool)
            self._makers |= workload.makers(line, bench.pool)
            buffers = Buffers(bench.most_nbytes, bench.device, peer=None if bench.pool == "cpu" else bench.pool)
            self.progress(0.02, "ceilings")
            what = "memcpy" if bench.device == "cpu" else "memory" if bench.pool == bench.device else "link"
            rates: dict[str, Any] = workload.copy_rates(buffers, bench.directions)
            rates.pop("memory", None)
            ceilings = self.ceilings = Ceilings(**rates, what=what, hard=what == "link")
            if bench.process:
                self.progress(0.05, "the other process")
                geometries = [task.geometry for task in todo]
                others, self.processes, refused = other_process(stack, bench.pool or "cpu", buffers, geometries, line)
                self._makers |= others
                self.missing += refused
            compute = cache(lambda kind, gpu: Compute(gpu, *KINDS[kind]))
            for k, task in enumerate(todo):
                self.progress(0.1 + 0.9 * k / len(todo), task.case)
                if self.clock() > until:
                    self.missing.append(Missing(task.case, f"{bench.seconds:g} seconds were over"))
                    continue
                moved = workload.work(buffers, task.geometry)
                if task.beside == IDLE:
                    yield from self._alone(task, moved, ceilings)
                else:
                    gpu = bench.pool if task.beside_on == ON_PEER else bench.device
                    yield from self._beside(task, moved, ceilings, compute(task.beside, gpu))
        self.progress(1.0, "done")

    def _alone(self, task: Row, moved: Work, ceilings: Ceilings) -> Iterator[Row]:
        """Measure every path and baseline on one work, in turn. On the CPU, memcpy is measured in any case."""
        asked, on_cpu, route = self.bench.asked, self.bench.device == "cpu", task.direction
        cases, broken = dict[str, tuple[Row, Baseline]](), list[Row]()
        for path in [path for path in dict.fromkeys((*asked, *[MEMCPY] * on_cpu)) if path in self._makers]:
            row = replace(task, path=path)
            with self._broken(row, broken):
                case = self._makers[path](moved)
                case.verify()
                cases[path] = row, case
        yield from broken
        try:
            timings = timed({path: case.begin for path, (_, case) in cases.items()}, seconds=CASE_SECONDS,
                            most=SAMPLES, warm_ups=WARM_UPS, rehearsed=on_cpu)  # fmt: skip
        except RuntimeError as error:  # one failed: the times of those that took turns with it mean nothing
            yield from (replace(row, broken=in_a_line(error)) for path, (row, _) in cases.items() if path in asked)
            return
        if MEMCPY in timings:
            gbps: dict[str, Any] = {route: moved.plan.nbytes / timings[MEMCPY].seconds / 1e9}
            ceilings = replace(ceilings, **gbps)
        for path, (row, _) in cases.items():
            if path in asked:
                seen = figures(row.nbytes, timings[path].seconds, ceilings, route)
                yield replace(row, **timings[path]._asdict(), **seen)

    def _beside(self, task: Row, moved: Work, ceilings: Ceilings, compute: Compute) -> Iterator[Row]:
        """Measure every path and baseline beside compute; beside decode, the kernel with several program counts."""
        for path, programs in self._cases(task):
            row = replace(task, path=path, programs=programs)
            seen: list[Row] = []
            with self._broken(row, seen), ExitStack() as stack:
                if path in OURS:
                    # A policy names the compute on the executor's own GPU, which is idle if its peer computes.
                    overlap = IDLE if task.beside_on == ON_PEER else task.beside
                    policy = Policy(path=path, max_programs=programs, overlap=overlap)
                    case = _ours(stack.enter_context(Executor(self.bench.device, policy)), path, moved)
                    begin = case.begin
                else:
                    case = self._makers[path](moved)
                    begin = stack.enter_context(aside(case.begin))
                case.verify()
                for _ in range(TRIES):
                    begin().synchronize()
                    taken = window(compute, begin)
                    if not taken.dry:
                        break
                if taken.dry:
                    self.missing.append(Missing(f"{row.label}: {row.case}", DRY))
                    continue
                wall = statistics.median(taken.transfers)
                found = figures(row.nbytes, wall, ceilings, row.direction)
                slowdown = None if found["broken"] else taken.slowdown
                seen.append(replace(row, seconds=wall, wall=wall, samples=len(taken.transfers), slowdown=slowdown,
                                    **found))  # fmt: skip
            yield from seen

    def _cases(self, task: Row) -> Iterator[tuple[str, int | None]]:
        many = task.beside == "decode"
        for path in self.bench.asked:
            if path == "kernel" and self.bench.pool:
                yield from ((path, programs) for programs in PEER_PROGRAMS[: None if many else 1])
            elif path == "kernel":
                usual = BESIDE_KERNELS[task.direction].programs
                yield from ((path, programs) for programs in (PROGRAMS if many else (usual,)))
            elif path != "auto":  # it takes one of the other paths
                yield path, None

    @contextmanager
    def _broken(self, row: Row, broken: list[Row]) -> Iterator[None]:
        """Note a way that refuses the work as missing, and one that fails or loses bytes as a broken row."""
        try:
            yield
        except (PathError, HostMemoryError) as error:
            self.missing.append(Missing(f"{row.label}: {row.case}", in_a_line(error)))
        except RuntimeError as error:  # TransferError, or torch's: no memory
            broken.append(replace(row, verified=False, broken=in_a_line(error)))


def _executor(device: str, path: str) -> Executor:
    if device == "cpu":
        return Executor(device, Policy(path=HOST, threads=1 if path == ONE_THREAD else None))
    return Executor(device, Policy(path=OURS[path]))


def _ours(executor: Executor, path: str, moved: Work) -> Baseline:
    """Return the way of an executor. Copies between GPUs are made run by run."""
    if path in COPY_PATHS and moved.geometry.direction not in HOST_ROUTES:
        workload.refuse_many(moved.geometry.runs)
    return workload.verified(path, moved, partial(executor.submit, moved.plan))
