"""A process of its own: load the compiled loops, plan and move all sorts, and say which were compiled once more."""

from __future__ import annotations

import sys

import numpy as np
from hypothesis import HealthCheck, given, settings
from numba.core.dispatcher import Dispatcher

import kvplan
from kvplan.cuda import calls, short_calls
from kvplan.execute.gpu import ring_loops
from kvplan.execute.gpu.by_layer import layer_loops
from kvplan.execute.gpu.resources import Limits
from kvplan.execute.host import memcpy
from kvplan.plan import loops_numba, placing_numba
from tests.simulated import Device, Tensor
from tests.simulated.executors import Drawn, executor_on
from tests.strategies import cases

LOOPS = {
    f"{module.__name__}.{name}": loop
    for module in (loops_numba, placing_numba, calls, short_calls, ring_loops, layer_loops, memcpy)
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
        for path in ("copy_engine", "staged"):
            drawn = Drawn(case, device := Device(), direction)
            with executor_on(device, path, limits=Limits(layer_group_nbytes=1)) as executor:
                executor.candidates(drawn.plan)
                executor.submit(drawn.plan).synchronize()
                executor.submit(drawn.plan, by_layer=True).synchronize()
            drawn.plan.descriptors(max_nbytes=24)


def main() -> None:
    device, pool, cache = Device(), *(np.zeros((4, 16, 2, 64), np.int8) for _ in range(2))
    device.pin(pool)
    host = kvplan.KVLayout.from_tensors("block token head dim", pool, seams=[pool.ctypes.data + 1000])
    there = kvplan.KVLayout.from_tensors("block token head dim", Tensor(cache))
    other = kvplan.KVLayout.from_tensors("block token head dim", cache, seams=[cache.ctypes.data + 1000])
    program = kvplan.compile(host, other)
    with executor_on(device) as executor:
        executor.prepare(kvplan.compile(host, there).plan([0], [0]), by_layer=True)
    check_loaded(
        "kvplan.plan.loops_numba", "kvplan.plan.placing_numba", "kvplan.cuda.calls", "kvplan.cuda.short_calls",
        "kvplan.execute.gpu.ring_loops", "kvplan.execute.gpu.by_layer.layer_loops",
    )  # fmt: skip
    with kvplan.Executor() as executor:
        executor.prepare(program.plan([0], [0]))
    check_loaded("kvplan.execute.host.memcpy")
    loaded = signatures()
    move()
    with kvplan.Executor() as executor:
        executor.submit(program.plan([0, 1, 2], [1, 2, 3])).synchronize()
    again = [name for name, count in signatures().items() if count > loaded[name]]
    sys.stdout.write(f"compiled: {', '.join(again) or 'nothing'}\n")


if __name__ == "__main__":
    main()
