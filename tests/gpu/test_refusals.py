"""What is refused is refused with its class, before anything moves, and leaves the executor as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout
from tests.gpu.flights import MOVE, small_pair
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Paged, Pair, pair_of

pytestmark = pytest.mark.gpu

every_path = pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "kernel", "staged", "auto"])
SMALL = Paged(DEVICE_NOTATION, dim=4096)
POOL = Paged(HOST_NOTATIONS["page-first"], dim=4096)


@contextmanager
def refused(
    executor: kvplan.Executor, *pairs: Pair, error: type[Exception] = kvplan.PathError, match: str = ""
) -> Iterator[None]:
    """An error of that class; no byte has moved; and the executor goes on."""
    with pytest.raises(error, match=match):
        yield
    torch.cuda.synchronize()
    for pair in pairs:
        pair.check()
    other = small_pair("store")
    executor.submit(other.plan(MOVE)).synchronize()
    other.check()


@every_path
@pytest.mark.parametrize("places", [("cpu", "cpu"), ("pinned", "pinned")])
def test_plans_between_host_memories(path, places, executor_of):
    executor, pair = executor_of(path=path), Pair(SMALL, POOL, places)
    with refused(executor, pair, match="CPU"):
        executor.submit(pair.program.plan([1], [2]))


def test_staging_within_a_gpu(executor_of):
    executor, pair = executor_of(path="staged"), pair_of("device", SMALL, POOL)
    with refused(executor, pair, match=r"stage|staging"):
        executor.submit(pair.program.plan([1], [2]))


@every_path
def test_addresses_that_are_virtual(path, executor_of):
    executor, pair = executor_of(path=path), small_pair("store")
    sizes = {"layer": 2, "block": 32, "token": 2, "head": 1, "dim": 4096}
    spec = {"notation": DEVICE_NOTATION, "sizes": sizes, "dtype": "uint8", "device": "cuda:0"}
    for layouts in ((KVLayout.from_spec(spec), pair.layouts[1]), (pair.layouts[1], KVLayout.from_spec(spec))):
        with refused(executor, pair, error=kvplan.LayoutError, match="virtual"):
            executor.submit(kvplan.compile(*layouts).plan([1], [2]))


@every_path
def test_destinations_that_are_read_only(path, executor_of):
    executor, pair = executor_of(path=path), Pair(SMALL, POOL, ("cuda:0", "pinned"))
    root = pair.dst_roots[0].numpy()
    view = POOL.view(root)
    view.flags.writeable = False
    read_only = KVLayout.from_tensors(POOL.notation, view)
    with refused(executor, pair, error=kvplan.LayoutError, match="read-only"):
        executor.submit(kvplan.compile(pair.layouts[0], read_only).plan([1], [2]))


@every_path
@pytest.mark.parametrize("plan", [None, 3, "plan"])
def test_what_is_no_plan(path, plan, executor_of):
    executor = executor_of(path=path)
    with refused(executor, error=kvplan.KVPlanError, match="plan is a"):
        executor.submit(plan)


@every_path
@pytest.mark.parametrize("after", [3, "stream", object()], ids=["int", "str", "object"])
def test_what_cannot_be_waited_for(path, after, executor_of):
    executor, pair = executor_of(path=path), small_pair("store")
    with refused(executor, pair, error=kvplan.KVPlanError, match="after is a"):
        executor.submit(pair.program.plan([1], [2]), after=after)


NUMBERS = ("max_programs", "tile_bytes", "staging_bytes", "chunk_bytes", "streams")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, True, "x", 4096.0, np.float32(4096)], ids=repr)
def test_policies_of_no_number(name, value):
    with pytest.raises(kvplan.PathError, match=f"{name} is "):
        kvplan.Policy(path="kernel", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("tile_bytes", 3), ("tile_bytes", 512), ("tile_bytes", 262_144), ("tile_bytes", 3072), ("streams", 9)],
)
def test_policies_out_of_range(name, value):
    with pytest.raises(kvplan.PathError, match=f"{name} is {value}"):
        kvplan.Policy(**{name: value})


@pytest.mark.parametrize("device", ["cuda:99", "cuda:-1", "cuda:x", "cuda:0:0", "gpu", ""])
def test_devices_that_are_not_there(device):
    with pytest.raises(kvplan.PathError, match="device"):
        kvplan.Executor(device=device)


def test_the_host_path_on_a_gpu():
    with pytest.raises(kvplan.PathError, match="host"):
        kvplan.Executor(device="cuda:0", policy=kvplan.Policy(path="host"))


@every_path
def test_a_gpu_s_path_on_the_cpu(path):
    if path == "auto":
        kvplan.Executor(device="cpu", policy=kvplan.Policy(path=path)).close()
        return
    with pytest.raises(kvplan.PathError, match=path):
        kvplan.Executor(device="cpu", policy=kvplan.Policy(path=path))


@pytest.mark.parametrize("direction", ["load", "store", "device"])
def test_plans_of_a_gpu_on_the_host_path(direction, executor):
    pair = pair_of(direction, SMALL, POOL)
    with pytest.raises(kvplan.PathError, match=f"'{direction}'"):
        executor.submit(pair.program.plan([1], [2]))
    pair.check()


@every_path
@pytest.mark.parametrize(("src", "dst"), [([99], [1]), ([1], [-1]), ([1, 2], [3])])
def test_ids_that_are_no_blocks_never_reach_an_executor(path, src, dst, executor_of):
    pair = small_pair("load")
    with pytest.raises(kvplan.BlockIndexError):
        executor_of(path=path).submit(pair.program.plan(src, dst))
    with pytest.raises(kvplan.OverlapError):
        executor_of(path=path).submit(pair.program.plan([1, 2], [3, 3]))
    torch.cuda.synchronize()
    pair.check()
