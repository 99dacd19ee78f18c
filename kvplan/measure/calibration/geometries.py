"""The transfers of a calibration, in an order in which all kinds are measured even if time is short."""

from __future__ import annotations

from collections.abc import Iterator

from kvplan.cost.policy import HOST_ROUTES
from kvplan.measure.workload import HOSTS, Geometry

KIB, MIB = 1 << 10, 1 << 20
HOST_NBYTES, DEVICE_NBYTES = 384 * MIB, 64 * MIB  # buffers of loads and stores
RING_NBYTES = 84 * MIB  # the default
# Buffers of a GPU's memory, of which there are two. Within a GPU, 64 MiB would be in its cache, and take no longer than
# the launch.
WITHIN_NBYTES, PAIR_NBYTES = 512 * MIB, 256 * MIB
ROUNDS = (16, 64)  # runs per block: one round over the grid for each; a fit needs two values to separate the terms

# (bytes per run, runs): from transfers whose time is the fixed costs, to transfers whose time is the bytes.
HOST_GRID = tuple(
    (run_nbytes, runs)
    for runs in (16, 64, 512, 4096, 16384)
    for run_nbytes in (512, 2 * KIB, 8 * KIB, 24 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB)
    if run_nbytes * runs <= DEVICE_NBYTES
)
MANY_RUNS = 65_536
HOST_MANY = ((128, MANY_RUNS), (512, MANY_RUNS), (KIB, MANY_RUNS))  # for paths whose runs cost almost nothing
GPU_GRID = tuple(
    (run_nbytes, runs)
    for runs in (16, 256, 4096, MANY_RUNS)
    for run_nbytes in (256, 512, 2 * KIB, 8 * KIB, 32 * KIB, 64 * KIB, MIB)
)  # every second one, from the second on, holds the transfers that show the ceiling

# (bytes per run, runs) beside compute: the first ones tell most, if time is short.
BESIDE_GRID = (
    (512, 256), (8 * KIB, 4096), (64 * KIB, 64), (256 * KIB, 64), (512, 4096), (32 * KIB, 16), (8 * KIB, 256),
    (64 * KIB, 1024),
)  # fmt: skip


def geometries(*routes: str) -> Iterator[Geometry]:
    """Yield the geometries of some routes, mixed: all to and from the host, all within a GPU, or all between GPUs."""
    host = routes[0] in HOST_ROUTES
    nbytes = DEVICE_NBYTES if host else WITHIN_NBYTES if "device" in routes else PAIR_NBYTES
    grid = (*HOST_GRID[::2], *HOST_GRID[1::2], *HOST_MANY) if host else (*GPU_GRID[1::2], *GPU_GRID[::2])
    for block_runs in ROUNDS:
        for run_nbytes, runs in grid:
            if runs < block_runs or max(runs, 2 * block_runs) * run_nbytes > nbytes:  # a cache has two blocks or more
                continue
            if not host and block_runs > ROUNDS[0] and runs == MANY_RUNS:
                continue  # only 2-D copies depend on the blocks, and are not measured for as many runs
            for route in routes:
                for order in HOSTS[: None if host and runs < MANY_RUNS else 1]:
                    yield Geometry(route, order, run_nbytes, runs, block_runs)
