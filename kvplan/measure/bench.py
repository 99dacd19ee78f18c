"""The bench: it times paths and baselines over sizes, counts, routes and pools, alone and beside compute.

A path or baseline is timed only after a comparison of every byte that it moved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from kvplan.base.numbers import rounded
from kvplan.cost.policy import BESIDE_KERNELS, HOST_ROUTES, IDLE_KERNELS, PEER_ROUTES, Policy
from kvplan.execute.executor import Executor
from kvplan.measure import baselines, ceilings
from kvplan.measure.baselines import Baseline, one_line, proven, timed_rows
from kvplan.measure.beside import ALONE, SECONDS, TRANSFERS, WARM
from kvplan.measure.compute import Compute, Window, compute_of, window
from kvplan.measure.flights import Aside, Begin
from kvplan.measure.grid import HOST, ONE_THREAD, Bench, Task, tasks
from kvplan.measure.peers import peer_baselines
from kvplan.measure.rows import IDLE, ON_PEER, Ceilings, Missing, Row, figures
from kvplan.measure.timing import Progress, silent
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
        missing: measurements that were not made, and why.
    """

    def __init__(
        self, bench: Bench, progress: Progress | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.bench = bench
        self.progress = progress or silent
        self.clock = clock
        self.ceilings: Ceilings | None = None
        self.missing: list[Missing] = []

    def rows(self) -> Iterator[Row]:
        """Measure all tasks, and yield a row for each measurement.

        Raises:
            KVPlanError: the device does not exist, or has too little memory.
        """
        bench, until = self.bench, self.clock() + self.bench.seconds
        self.missing += [Missing(f"{rounded(size)} x {runs:,}", f"more than {rounded(bench.most_nbytes)}")
                         for size, runs in bench.too_large()]  # fmt: skip
        self.progress(0.0, "memory")
        with ExitStack() as stack:
            pair = stack.enter_context(peer_baselines.Pair(bench.device, bench.peer)) if bench.peer else None
            made = {path: stack.enter_context(_executor(bench.device, path))
                    for path in bench.asked if path not in baselines.names(bench.device, bench.peer)}  # fmt: skip
            others = peer_baselines.makers(pair) if pair else \
                baselines.makers(bench.device) if set(bench.asked) - set(made) else {}  # fmt: skip
            buffers = Buffers(bench.most_nbytes, bench.device, peer=bench.peer)
            self.progress(0.02, "ceilings")
            self.ceilings = found = ceilings.measured(buffers, bench.directions if pair else HOST_ROUTES)
            computes: dict[tuple[str, str], Compute] = {}
            todo = tasks(bench)
            for k, task in enumerate(todo):
                self.progress(0.05 + 0.95 * k / len(todo), task.name)
                if self.clock() > until:
                    self.missing.append(Missing(task.name, f"{bench.seconds:g} seconds were over"))
                    continue
                moved = work(buffers, task.geometry)
                if task.beside == IDLE:
                    cases = {path: _ours(made[path], path, moved) if path in made else partial(others[path], moved)
                             for path in bench.asked}  # fmt: skip
                    yield from self._alone(task, cases, found)
                else:
                    where = bench.peer if bench.peer and task.on == ON_PEER else bench.device
                    if (task.beside, where) not in computes:
                        computes[task.beside, where] = compute_of(where, task.beside)
                    yield from self._beside(task, moved, others, computes[task.beside, where], found, until)
        self.progress(1.0, "done")

    def _alone(self, task: Task, cases: dict[str, Callable[[], Baseline]], found: Ceilings) -> Iterator[Row]:
        """Measure every path and baseline on one work, alternating between them."""
        begun: dict[str, tuple[Row, Begin]] = {}
        for path, make in cases.items():
            programs = _programs(task.geometry.direction, self.bench.device) if path == "kernel" else None
            row = self._row(task, path, programs=programs)
            case = proven(make, row, task.name, self.missing)
            if isinstance(case, Row):
                yield case
            elif case is not None:
                begun[path] = replace(row, predicted=case.expect()), case.begin
        yield from timed_rows(begun, found, seconds=CASE_SECONDS, most=SAMPLES, warm_ups=WARM_UPS)

    def _beside(
        self, task: Task, moved: Work, others: Any, compute: Compute, found: Ceilings, until: float
    ) -> Iterator[Row]:
        """Measure every path and baseline beside compute; beside decode, the kernel with several program counts."""
        bench, direction = self.bench, task.geometry.direction
        cases: list[tuple[str, int | None]] = []
        for path in bench.asked:
            if path == "kernel" and bench.peer:
                cases += [(path, programs) for programs in PEER_PROGRAMS[: None if task.beside == "decode" else 1]]
            elif path == "kernel":
                few = PROGRAMS if task.beside == "decode" else (BESIDE_KERNELS[direction].programs,)
                cases += [(path, programs) for programs in few]
            elif path != "auto":  # auto takes one of the other paths
                cases.append((path, None))
        for path, programs in cases:
            row = self._row(task, path, programs=programs)
            if self.clock() > until:
                self.missing.append(Missing(f"{row.label}, {task.name}", f"{bench.seconds:g} seconds were over"))
                continue
            with ExitStack() as stack:
                if path in others:
                    aside = stack.enter_context(Aside())
                    make: Callable[[], Baseline] = partial(others[path], moved)
                else:
                    aside = None
                    # A policy names the compute on the executor's own GPU, which is idle if its peer computes.
                    overlap = IDLE if task.on == ON_PEER else task.beside
                    policy = Policy(path=path, max_programs=programs, overlap=overlap)
                    make = _ours(stack.enter_context(Executor(bench.device, policy)), path, moved)
                case = proven(make, row, task.name, self.missing)
                if isinstance(case, Row):
                    yield case
                elif case is not None:
                    begin = partial(aside.begin, case.begin) if aside else case.begin
                    taken = _window(compute, begin)
                    if isinstance(taken, Window) and taken.dry:
                        self.missing.append(Missing(f"{row.label}: {task.name}", DRY))
                        continue
                    yield _seen(row, taken, found, case.expect())

    def _row(self, task: Task, path: str, programs: int | None = None) -> Row:
        return Row(**task.geometry._asdict(), path=path, beside=task.beside, programs=programs, beside_on=task.on)


def _executor(device: str, path: str) -> Executor:
    if path in (HOST, ONE_THREAD):
        return Executor(device, Policy(path=HOST, threads=1 if path == ONE_THREAD else None))
    return Executor(device, Policy(path=path))


def _ours(executor: Executor, path: str, moved: Work) -> Callable[[], Baseline]:
    begin = partial(executor.submit, moved.plan)

    def expect() -> float | None:
        if executor.device == "cpu":
            return None
        found = [one for one in executor.candidates(moved.plan) if not one.refused and path in ("auto", one.path)]
        if not found:
            return None
        return found[0].seconds if executor.policy.overlap == IDLE else found[0].wall

    def make() -> Baseline:
        if path in COPY_PATHS and moved.geometry.direction in ("device", *PEER_ROUTES):
            peer_baselines.refuse_many(moved)
        return Baseline(begin, lambda: moved.verify(path, lambda: begin().synchronize()), expect)

    return make


def _window(compute: Compute, begin: Callable[[], Any]) -> Window | str:
    """Measure transfers beside compute, and again if its queue ran empty. Return an error as text."""
    try:
        for _ in range(TRIES):
            begin().synchronize()
            taken = window(compute, begin, warm=WARM, alone=ALONE, transfers=TRANSFERS, seconds=SECONDS)
            if not taken.dry:
                break
    except RuntimeError as error:  # the transfer does not end, or failed
        return one_line(error)
    return taken


def _seen(row: Row, taken: Window | str, found: Ceilings, expected: float | None) -> Row:
    """Return the row of a window beside compute."""
    if isinstance(taken, str):
        return replace(row, broken=taken)
    wall = statistics.median(taken.transfers)
    facts = figures(row.nbytes, wall, found, row.direction)
    slowdown = None if facts["broken"] else taken.slowdown
    return replace(row, seconds=wall, wall=wall, samples=len(taken.transfers), slowdown=slowdown,
                   predicted=expected, **facts)  # fmt: skip


def _programs(route: str, device: str) -> int:
    """Return the Triton programs of the kernel path without compute."""
    programs = IDLE_KERNELS[route].programs
    return programs if programs > 0 else Policy().kernel(route, ceilings.multiprocessors(device)).programs
