"""A process of its own: load the compiled loops, plan and move all sorts, and say which were compiled once more."""

from __future__ import annotations

import sys

import numpy as np
from hypothesis import HealthCheck, given, settings
from numba.core.dispatcher import Dispatcher

import kvplan
from kvplan.cuda import player
from kvplan.execute import memcpy
from kvplan.execute.gpu import row_loops
from kvplan.plan import loops_numba
from tests.simulated.drawn import Drawn, executor, owned
from tests.simulated_driver import simulated
from tests.strategies import cases

LOOPS = {
    f"{module.__name__}.{name}": loop
    for module in (loops_numba, player, row_loops, memcpy)
    for name, loop in vars(module).items()
    if isinstance(loop, Dispatcher)
}


def signatures() -> dict[str, int]:
    return {name: len(loop.signatures) for name, loop in LOOPS.items()}


def check_loaded(*modules: str) -> None:
    for name, count in signatures().items():
        module, _, function = name.rpartition(".")
        assert count or module not in modules or function.startswith("_"), name  # what those call comes with them


@settings(max_examples=40, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def move(case):
    for direction in ("load", "store"):
        for path in ("copy_engine", "staged", "kernel"):
            with simulated() as driver, executor(path) as made:
                drawn = Drawn(case, driver, direction)
                made.candidates(drawn.plan)
                made.submit(drawn.plan).synchronize()
                made.submit(drawn.plan, by_layer=True).synchronize()
                drawn.plan.descriptors(max_nbytes=24)


def main() -> None:
    pool, cache = (np.zeros((4, 16, 2, 64), np.int8) for _ in range(2))
    host = kvplan.KVLayout.from_tensors("block token head dim", pool, seams=[pool.ctypes.data + 1000])
    other = kvplan.KVLayout.from_tensors("block token head dim", cache, seams=[cache.ctypes.data + 1000])
    program = kvplan.compile(host, other)
    with simulated() as driver, executor() as made:
        driver.pin(pool)
        there = kvplan.KVLayout.from_tensors("block token head dim", owned(driver, cache))
        made.prepare(kvplan.compile(host, there).plan([0], [0]), by_layer=True)
    check_loaded("kvplan.plan.loops_numba", "kvplan.cuda.player", "kvplan.execute.gpu.row_loops")
    with kvplan.Executor() as here:
        here.prepare(program.plan([0], [0]))
    check_loaded("kvplan.execute.memcpy")
    loaded = signatures()
    move()
    with kvplan.Executor() as here:
        here.submit(program.plan([0, 1, 2], [1, 2, 3])).synchronize()
    again = [name for name, count in signatures().items() if count > loaded[name]]
    sys.stdout.write(f"compiled: {', '.join(again) or 'nothing'}\n")


if __name__ == "__main__":
    main()
