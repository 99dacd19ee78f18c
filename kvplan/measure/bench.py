"""The bench: it times paths and baselines over sizes, counts, routes and pools, alone and beside compute.

A path or baseline is timed only after a comparison of every byte that it moved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from kvplan.base.numbers import rounded
from kvplan.cost.policy import BESIDE_KERNELS, IDLE_KERNELS, Policy
from kvplan.errors import HostMemoryError, PathError
from kvplan.execute.executor import Executor
from kvplan.measure import baselines
from kvplan.measure.baselines import MEMCPY, Baseline, Maker
from kvplan.measure.compute import KINDS, Compute, Window, window
from kvplan.measure.grid import HOST, ONE_THREAD, OURS, Bench, Task, tasks
from kvplan.measure.processes import NIXL, Findings, other_process
from kvplan.measure.rig import Aside, Line, Progress, silent, timed
from kvplan.measure.rows import IDLE, ON_PEER, Ceilings, Missing, Row, figures
from kvplan.measure.workload import Buffers, Work, work

PROGRAMS = (1, 2, 4, 8)  # numbers of Triton programs that are measured beside decode
PEER_PROGRAMS = (None, 4, 8, 16)  # the same between GPUs; None stands for the default of the policy
COPY_PATHS = ("copy_engine", "copy_engine_2d")
SAMPLES, CASE_SECONDS, WARM_UPS = 15, 0.02, 1
TRIES = 2  # measurements of a window in which compute ran out of work
DRY = "the queue of compute ran empty meanwhile"


class Run:
    """One run of a bench. :meth:`rows` measures, and sets the attributes.

    Args:
        bench: the measurements to make.
        progress: function that is called with the share that is done, and the step that begins.
        clock: function that returns seconds; tests replace it.

    Attributes:
        ceilings: the measured ceilings; None before the first row.
        findings: the times of a meeting and of one block, if another process has the pool.
        missing: measurements that were not made, and why.
    """

    def __init__(
        self, bench: Bench, progress: Progress | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.bench, self.clock = bench, clock
        self.progress = progress or silent
        self.ceilings: Ceilings | None = None
        self.findings = Findings()
        self.missing: list[Missing] = []
        self._ours: Mapping[str, Maker] = {}
        self._others: Mapping[str, Maker] = {}

    def rows(self) -> Iterator[Row]:
        """Measure all tasks, and yield a row for each measurement.

        Raises:
            KVPlanError: the device does not exist, or has too little memory; or processes cannot meet.
        """
        bench, until = self.bench, self.clock() + self.bench.seconds
        self.missing += [Missing(f"{rounded(size)} x {runs:,}", f"more than {rounded(bench.most_nbytes)}")
                         for size, runs in bench.too_large()]  # fmt: skip
        self.progress(0.0, "memory")
        with ExitStack() as stack:
            self._ours = {name: partial(_ours, stack.enter_context(_executor(bench.device, name)), name)
                          for name in bench.asked if name in OURS}  # fmt: skip
            line = Line(bench.device, bench.pool)
            self._others = baselines.makers(line, bench.pool)
            buffers = Buffers(bench.most_nbytes, bench.device, peer=None if bench.pool == "cpu" else bench.pool)
            self.progress(0.02, "ceilings")
            self.ceilings = baselines.ceilings(buffers, bench.directions)
            todo, computes = tasks(bench), dict[tuple[str, str], Compute]()
            if bench.process:
                self.progress(0.05, "the other process")
                geometries = [task.geometry for task in todo]
                makers, refused = other_process(stack, bench.pool or "cpu", buffers, geometries, line, self.findings)
                self._ours = {**self._ours, **makers}
                self.missing += refused
            for k, task in enumerate(todo):
                self.progress(0.1 + 0.9 * k / len(todo), task.name)
                if self.clock() > until:
                    self._late(task.name)
                    continue
                moved = work(buffers, task.geometry)
                if task.beside == IDLE:
                    yield from self._alone(task, moved)
                else:
                    where = bench.pool if bench.pool and task.on == ON_PEER else bench.device
                    if (task.beside, where) not in computes:
                        computes[task.beside, where] = Compute(where, *KINDS[task.beside])
                    yield from self._beside(task, moved, computes[task.beside, where], until)
        self.progress(1.0, "done")

    def _late(self, what: str) -> None:
        self.missing.append(Missing(what, f"{self.bench.seconds:g} seconds were over"))

    def _alone(self, task: Task, moved: Work) -> Iterator[Row]:
        """Measure every path and baseline on one work, in turn. On the CPU, memcpy is measured in any case."""
        cases: dict[str, tuple[Row, Baseline]] = {}
        makers, on_cpu = {**self._others, **self._ours}, self.bench.device == "cpu"
        for path in (*self.bench.asked, *({MEMCPY} - {*self.bench.asked} if on_cpu else ())):
            if path not in makers or (path in NIXL.values() and path != NIXL[task.geometry.direction]):
                continue
            row = Row(**task.geometry._asdict(), path=path, programs=self._programs(path, task.geometry.direction))
            found = self._proven(partial(makers[path], moved), row, task)
            if isinstance(found, Baseline):
                cases[path] = row, found
            elif found is not None:
                yield found
        try:
            timings = timed({path: case.begin for path, (_, case) in cases.items()}, seconds=CASE_SECONDS,
                            most=SAMPLES, warm_ups=WARM_UPS, rehearsed=on_cpu)  # fmt: skip
        except RuntimeError as error:  # one failed: the times of those that took turns with it mean nothing
            yield from (replace(row, broken=one_line(error)) for path, (row, _) in cases.items()
                        if path in self.bench.asked)  # fmt: skip
            return
        assert self.ceilings is not None  # measured first
        limits = self.ceilings
        if MEMCPY in timings:
            limits = limits.at(task.geometry.direction, moved.plan.nbytes / timings[MEMCPY].seconds / 1e9)
        for path, (row, _) in cases.items():
            if path in self.bench.asked:
                seen = figures(row.nbytes, timings[path].seconds, limits, row.direction)
                yield replace(row, **timings[path]._asdict(), **seen)

    def _beside(self, task: Task, moved: Work, compute: Compute, until: float) -> Iterator[Row]:
        """Measure every path and baseline beside compute; beside decode, the kernel with several program counts."""
        for path, programs in self._cases(task):
            row = Row(**task.geometry._asdict(), path=path, beside=task.beside, programs=programs, beside_on=task.on)
            if self.clock() > until:
                self._late(f"{row.label}, {task.name}")
                continue
            with ExitStack() as stack:
                if path in self._others:
                    aside = stack.enter_context(Aside())
                    found = self._proven(partial(self._others[path], moved), row, task)
                else:
                    # A policy names the compute on the executor's own GPU, which is idle if its peer computes.
                    overlap = IDLE if task.on == ON_PEER else task.beside
                    policy = Policy(path=path, max_programs=programs, overlap=overlap)
                    executor = stack.enter_context(Executor(self.bench.device, policy))
                    found = self._proven(partial(_ours, executor, path, moved), row, task)
                if isinstance(found, Row):
                    yield found
                elif found is not None:
                    begin = partial(aside.begin, found.begin) if path in self._others else found.begin
                    yield from self._seen(row, task, _window(compute, begin))

    def _cases(self, task: Task) -> Iterator[tuple[str, int | None]]:
        for path in self.bench.asked:
            if path != "kernel":
                yield from [(path, None)] if path != "auto" else []  # auto takes one of the other paths
            elif self.bench.pool:
                yield from ((path, programs) for programs in PEER_PROGRAMS[: None if task.beside == "decode" else 1])
            elif task.beside == "decode":
                yield from ((path, programs) for programs in PROGRAMS)
            else:
                yield path, BESIDE_KERNELS[task.geometry.direction].programs

    def _seen(self, row: Row, task: Task, taken: Window | str) -> Iterator[Row]:
        """Yield the row of a window beside compute."""
        assert self.ceilings is not None  # measured first
        if isinstance(taken, str):
            yield replace(row, broken=taken)
        elif taken.dry:
            self.missing.append(Missing(f"{row.label}: {task.name}", DRY))
        else:
            wall = statistics.median(taken.transfers)
            seen = figures(row.nbytes, wall, self.ceilings, row.direction)
            slowdown = None if seen["broken"] else taken.slowdown
            yield replace(row, seconds=wall, wall=wall, samples=len(taken.transfers), slowdown=slowdown, **seen)

    def _proven(self, make: Callable[[], Baseline], row: Row, task: Task) -> Baseline | Row | None:
        """Return a way that is verified; a broken row if bytes did not arrive; None if it refuses, which is listed."""
        try:
            found = make()
            found.verify()
        except (PathError, HostMemoryError) as error:
            self.missing.append(Missing(f"{row.label}: {task.name}", one_line(error)))
            return None
        except RuntimeError as error:  # TransferError, or torch's: no memory
            return replace(row, verified=False, broken=one_line(error))
        return found

    def _programs(self, path: str, route: str) -> int | None:
        """Return the Triton programs of the kernel path without compute."""
        if path != "kernel":
            return None
        programs = IDLE_KERNELS[route].programs
        return programs if programs > 0 else Policy().kernel(
            route, baselines.multiprocessors(self.bench.device)).programs  # fmt: skip


def one_line(error: Exception) -> str:
    """Return an error's text in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _executor(device: str, path: str) -> Executor:
    if device == "cpu":
        return Executor(device, Policy(path=HOST, threads=1 if path == ONE_THREAD else None))
    return Executor(device, Policy(path=OURS[path]))


def _ours(executor: Executor, path: str, moved: Work) -> Baseline:
    """Return the way of an executor. Copies between GPUs are made run by run."""
    begin: Any = partial(executor.submit, moved.plan)
    if path in COPY_PATHS and moved.geometry.direction not in ("load", "store"):
        baselines.refuse_many(moved.geometry.runs)
    return baselines.verified(path, moved, begin)


def _window(compute: Compute, begin: Callable[[], Any]) -> Window | str:
    """Measure transfers beside compute, and again if its queue ran empty. Return an error as text."""
    try:
        for _ in range(TRIES):
            begin().synchronize()
            taken = window(compute, begin)
            if not taken.dry:
                break
    except RuntimeError as error:  # the transfer does not end, or failed
        return one_line(error)
    return taken
