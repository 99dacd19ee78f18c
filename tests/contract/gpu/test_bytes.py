"""Every path moves the bytes that the oracle moves, on every route that it serves, and touches no other byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvplan
from tests.contract.gpu.caches import CACHE, POOL, ROUTES, SERVED, Ids, both_ways, described, each_way, forms, way

HND = "layer: kv block head token dim"
ROWS = "layer: block token dim"  # latent caches have rows of odd sizes, and neither heads nor K and V


def rows(nbytes):
    even = nbytes & -nbytes  # what divides every address
    sizes = {"dim": nbytes, "block": 12, "token": 3, "align": min(even, 16)}
    return *forms(ROWS, "block layer token dim", **sizes), Ids([11, 0, 5, 6], [3, 4, 9, 1])


MANY = [np.random.default_rng(seed).permutation(300).tolist() for seed in range(2)]
LARGER = forms(padded=False, block=16, token=2, dim=80)[0], forms(block=6, token=6, dim=80)[1]
SHARING = forms(padded=False, block=9, token=4, dim=32)[0], forms(pool=HND, block=7, token=6, dim=32)[1]
WHOLE = "layer: block dim", "layer block dim"
# A cache, a pool, and ids of the way from the cache to the pool.
CASES = {
    "blocks": (CACHE, POOL, Ids([3, 1, 8, 5], [0, 7, 2, 4])),
    **{f"rows of {nbytes}": rows(nbytes) for nbytes in (131, 132, 134, 576, 584, 656)},
    "heads before tokens": (*forms(pool=HND, token=4, head=3, dim=48), Ids([0, 2, 4], [8, 6, 7])),
    "larger blocks": (*LARGER, Ids([9, 1, 15, 2, 3], [5, 0], 0, 1)),
    "part of the last larger block": (*LARGER, Ids([9, 1, 15, 2], [5, 0])),
    "blocks that share a unit": (*SHARING, Ids([8, 0, 3], [6, 2], 1, 2)),
    "many rows": (*forms(pool=HND, padded=False, block=300, dim=16), Ids(*MANY)),
    "long runs": (*forms(padded=False, dim=40_008), Ids([3, 4, 5, 0], [6, 7, 8, 1])),
    "runs that merge": (
        *forms(*WHOLE, padded=False, dim=640, block=64),
        Ids([*range(20), 63, 21], [*range(30, 50), 0, 1]),
    ),
    "nothing": (CACHE, POOL, Ids([], [])),
}
SIZES = {"staged": {"staging_bytes": 1 << 15}}  # a ring that is used again and again


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("path", "route"), [(path, route) for path in SERVED for route in SERVED[path]])
def test_every_byte_arrives_and_no_other_changes(gpu, path, route, case):
    if "cuda:1" in ROUTES[route] and gpu.count < 2:
        pytest.skip("there is one GPU")
    cache, pool, ids = CASES[case]
    pair = way(gpu, route, cache, pool, seed=len(case))
    ids = ids if pair.src is cache else ids.back
    sizes = {} if case == "long runs" else SIZES.get(path, {})
    executor = gpu.executor(path, "cpu" if route == "host" else "cuda:0", **sizes)
    other = Ids(ids.src[::-1], ids.dst, ids.src_skip, ids.dst_skip)
    for move, by_layer in ((ids, False), (other, True)):
        plan = pair.plan(move)
        result = executor.submit(plan, by_layer=by_layer).result()
        assert result.nbytes == plan.nbytes
        assert path in ("auto", result.path)
        pair.check()


POLICIES: tuple[dict[str, Any], ...] = (
    {"path": "kernel", "max_programs": 1}, {"path": "kernel", "max_programs": 400},
    {"path": "staged", "staging_bytes": 131_072}, {"path": "staged", "max_programs": 1},
    {"path": "staged", "staging_bytes": 196_608}, {"overlap": "decode"},
)  # fmt: skip


@both_ways
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: " ".join(f"{k}={v}" for k, v in policy.items()))
def test_a_policy_changes_how_and_never_what(gpu, route, policy):
    cache, pool = forms(block=100, dim=584)
    executor, pair = gpu.executor(**policy), way(gpu, route, cache, pool)
    for blocks in (75, 1):
        executor.submit(pair.plan(Ids(*([n for n in some if n < 100][:blocks] for some in MANY)))).synchronize()
        pair.check()


@each_way
def test_seams_of_a_pool_change_no_byte(gpu, path, route):
    """Registrations of pinned memory may end anywhere: the pool's layout says where, as seams."""
    cache, pool = forms(*WHOLE, padded=False, dim=640, block=9)
    pair = way(gpu, route, cache, pool)
    side = 0 if route == "load" else 1
    first = pair.layouts[side].address(layer=0, part="kv", block=0)
    seams = (first + 1000, first + 640 * 4, first + 640 * 9 + 16)
    layouts = list(pair.layouts)
    layouts[side] = described(pool, (pair.sources, pair.targets)[side], seams=seams)
    pair.program = kvplan.compile(*layouts)
    plan = pair.plan(Ids(range(9), range(9)))
    gpu.executor(path).submit(plan).synchronize()
    pair.check()
    descriptors = plan.descriptors()
    ends = (descriptors.src, descriptors.dst)[side]
    assert not any(((ends < seam) & (seam < ends + descriptors.size)).any() for seam in seams)


@each_way
def test_joined_plans_move_as_one(gpu, path, route):
    """Groups of a hybrid model: several pairs of layouts, one transfer."""
    pairs = [way(gpu, route, seed=1), way(gpu, route, *CASES["rows of 584"][:2], seed=2), way(gpu, route, seed=3)]
    plan = kvplan.join([pair.plan(Ids([k, 8], [5, 1 + k])) for k, pair in enumerate(pairs)])
    assert gpu.executor(path).submit(plan).result().nbytes == plan.nbytes
    for pair in pairs:
        pair.check()


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "kernel", "auto"])
@pytest.mark.parametrize("several", [1, 9])
def test_joined_plans_of_many_rows_within_a_gpu(gpu, path, several):
    """Kernels read the units of many rows from GPU memory."""
    cases = [CASES["many rows"], CASES["rows of 584"]] * several
    pairs = [way(gpu, "device", *forms, seed=seed) for seed, (*forms, _) in enumerate(cases)]
    plan = kvplan.join([pair.plan(ids) for pair, (*_, ids) in zip(pairs, cases, strict=True)])
    executor = gpu.executor(path)
    for _ in range(2):
        assert executor.submit(plan).result().nbytes == plan.nbytes
        for pair in pairs:
            pair.check()


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "kernel", "auto"])
def test_there_and_back_restores_every_byte(gpu, path):
    store = way(gpu, "store", *CASES["blocks that share a unit"][:2])
    executor, kept = gpu.executor(path), [root.copy() for root in store.src_bytes]
    first = executor.submit(store.plan(Ids([8, 0, 3], [6, 2], 1, 1)))
    back = kvplan.compile(*store.layouts[::-1]).plan([6, 2], [8, 0, 3], 1, 1)
    executor.submit(back, after=first).synchronize()
    assert all((memory.bytes() == root).all() for memory, root in zip(store.sources, kept, strict=True))
    store.check()
