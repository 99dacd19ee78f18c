"""Law 3: what travels in chunks is what the plan moves, also if one end knows the layouts alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.cost.policy import ROUTES
from kvplan.plan.row_plans import Memory, RowProgram, layout_of
from tests import oracle
from tests.compiled_cases import assert_same, compiled, planned
from tests.plan.chunks.rings import Half, composed, through
from tests.profiles import examples
from tests.ranks.topologies import reshards, shards_of
from tests.simulated.drawn import PATHS, Drawn
from tests.simulated.drawn import executor as gpu_executor
from tests.simulated_driver import simulated
from tests.strategies import cases, neighbour_cases

MOST = st.sampled_from((256, 512, 1024, 4096, 1 << 16))


@examples(400)
@given(case=cases(), most=MOST)
def test_gather_and_scatter_are_the_plan(case, most, executor):
    src, dst, _, plan = compiled(case)
    through(executor, plan, most)
    before = case.src.build(case.seed)
    assert_same([dst, src], [case.moved(before), before])


@examples(200)
@given(
    several=st.lists(st.one_of(cases(max_blocks=3), neighbour_cases()), min_size=1, max_size=3),
    groups=st.integers(1, 4),
    most=MOST,
)
def test_joined_plans_by_layer(several, groups, most):
    """Laws 3 and 7: the chunks of a joined plan's layers move together what the plan moves, layer after layer."""
    plan = kvplan.join([planned(case) for case in several])
    cut = Half(plan, 0, most, groups).cut
    assert [chunk.group for chunk in cut.chunks] == sorted(chunk.group for chunk in cut.chunks)
    assert [sorted(layers) for layers in cut.layers] == sorted(sorted(layers) for layers in cut.layers)
    assert composed(plan, most, groups) == oracle.factored_moves(plan)


@examples(60)
@given(case=reshards(), most=MOST)
def test_every_pair_of_ranks(case, most):
    """Laws 3 and 6: each pair of ranks packs what both hold."""
    for program in kvplan.reshard(*shards_of(case)).values():
        plan = program.plan(*case.ids, *case.skips)
        assert composed(plan, most) == oracle.factored_moves(plan)


@examples(100)
@given(data=st.data(), most=MOST)
def test_rows_of_several_sizes(data, most):
    pools = [np.zeros(1 << 14, np.uint8) for _ in range(2)]
    program = RowProgram(*(layout_of([Memory(pool.ctypes.data, pool.nbytes, "cpu", pool)]) for pool in pools))
    places = data.draw(st.lists(st.integers(0, 63), max_size=40, unique=True))
    sizes = np.array([data.draw(st.sampled_from((8, 24, 64, 200))) for _ in places], np.int64)
    starts = [np.array(data.draw(st.permutations(places)), np.int64) * 256 + pool.ctypes.data for pool in pools]
    plan = program.plan(*starts, sizes, 8)
    src, dst = Half(plan, 0, most), Half(plan, 1, most)
    ring = np.zeros(most + 256, np.uint8)
    layout, slot = layout_of([Memory(ring.ctypes.data, ring.nbytes, "cpu", ring)]), -(-ring.ctypes.data // 256) * 256
    moves = dict[int, int]()
    for number in range(len(src.cut.chunks)):
        gathered = oracle.factored_moves(src.plan(number, src.ids(number, 0), layout, slot))
        scattered = oracle.factored_moves(dst.plan(number, src.ids(number, 1), layout, slot))
        moves |= {to: gathered[at] for to, at in scattered.items()}
    assert moves == oracle.factored_moves(plan)


@pytest.mark.parametrize("path", [path for path in PATHS if path != "staged"])
@examples(60)
@given(
    case=cases(), route=st.sampled_from(ROUTES), most=st.sampled_from((256, 1024, 1 << 16)), seed=st.integers(0, 2**32)
)
def test_every_path_gathers_and_scatters(path, case, route, most, seed):
    """Laws 1 to 3: a GPU gathers to its ring and scatters from it, by each path, whatever side is its own."""
    with simulated(2, seed) as driver:
        drawn = Drawn(case, driver, route)
        memory = np.zeros(2 * (most + 512), np.uint8)
        driver.own(memory, 0)
        layout = layout_of([Memory(memory.ctypes.data, memory.nbytes, "cuda:0", memory)])
        slots = [-(-(memory.ctypes.data + k * (most + 256)) // 256) * 256 for k in (0, 1)]
        src, dst = Half(drawn.plan, 0, most), Half(drawn.plan, 1, most)
        free: list = [None, None]
        with gpu_executor(path) as executor:
            for k in range(len(src.cut.chunks)):
                one = k % 2
                gathered = executor.submit(src.plan(k, src.ids(k, 0), layout, slots[one]), after=free[one])
                free[one] = executor.submit(dst.plan(k, src.ids(k, 1), layout, slots[one]), after=gathered)
            for transfer in free:
                if transfer is not None:
                    transfer.synchronize()
            drawn.check()
