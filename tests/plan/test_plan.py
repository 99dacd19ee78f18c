"""Plans: ids in every shape, skips, merging, seams, caps; literal numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout
from kvplan.plan import loops_numpy, placement
from tests import oracle
from tests.compiled_cases import by_dst, twin_of
from tests.plan.slow_twins import uncompiled


def tokens(num_blocks: int, block_tokens: int, dim: int = 8, notation: str = "block token dim", **kwargs) -> KVLayout:
    return KVLayout.from_tensors(notation, np.zeros((num_blocks, block_tokens, dim), np.uint8), **kwargs)


def units_of(plan, layout, side: int, unit_nbytes: int) -> list[int]:
    """Unit numbers of a plan on one side, from its factored form."""
    return ((plan.parts[0].units[side] - layout.regions[0].address) // unit_nbytes).tolist()


def test_the_worked_example_of_the_design():
    gpu, cpu = tokens(16, 16), tokens(4, 64)
    program = kvplan.compile(gpu, cpu)
    assert program.unit_tokens == 16
    plan = program.plan(list(range(11)), [0, 1, 3], dst_skip=1)
    assert plan.units == 11
    assert units_of(plan, cpu, 1, 128) == [1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]
    assert units_of(plan, gpu, 0, 128) == list(range(11))
    back = kvplan.compile(cpu, gpu).plan([0, 1, 3], list(range(11)), src_skip=1)
    assert units_of(back, cpu, 0, 128) == [1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]


def test_the_last_larger_block_may_be_partly_used():
    program = kvplan.compile(tokens(16, 16), tokens(4, 64))
    assert [program.plan(range(n), [2, 0]).units for n in (5, 6, 7, 8)] == [5, 6, 7, 8]
    for n in (4, 9):
        with pytest.raises(kvplan.BlockIndexError):
            program.plan(range(n), [2, 0])


def test_blocks_of_24_and_16_tokens():
    src, dst = tokens(4, 24), tokens(6, 16)
    plan = kvplan.compile(src, dst).plan([3, 1], [5, 0, 2], src_skip=1, dst_skip=1)
    assert units_of(plan, src, 0, 64) == [10, 11, 3, 4, 5]
    assert units_of(plan, dst, 1, 64) == [11, 0, 1, 4, 5]


IDS = [3, 0, 2]


@pytest.mark.parametrize(
    "ids",
    [
        IDS,
        tuple(IDS),
        range(3, 0, -1),
        np.array(IDS, np.int64),
        np.array(IDS, np.int32),
        np.array(IDS, np.uint8),
        np.array(IDS, np.uint64),
        np.array(IDS, ">i4"),
        np.array([3, 9, 0, 9, 2], np.int64)[::2],
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        torch.tensor([3, 9, 0, 9, 2])[::2],
        [np.int32(3), 0, np.int64(2)],
    ],
    ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')}",
)
def test_ids_of_every_type(ids):
    src, dst = tokens(4, 4), tokens(4, 4)
    plan = kvplan.compile(src, dst).plan(ids, [1, 2, 3])
    assert units_of(plan, src, 0, 32) == list(ids)


def test_read_only_ids_are_fine_and_ids_are_read_once():
    ids = np.array(IDS)
    ids.setflags(write=False)
    src, dst = tokens(4, 4), tokens(4, 4)
    program = kvplan.compile(src, dst)
    mine = np.array([1, 2, 3])
    plan = program.plan(ids, mine)
    mine[:] = 0
    assert units_of(plan, dst, 1, 32) == [1, 2, 3]


def test_a_source_may_go_to_several_places():
    src, dst = tokens(4, 4), tokens(4, 4)
    plan = kvplan.compile(src, dst).plan([1, 1, 2, 2], [0, 2, 1, 3])
    assert by_dst(plan.descriptors()) == by_dst(twin_of(plan))
    assert plan.descriptors().size.tolist() == [64, 64]  # 1, 2 to 0, 1 and again to 2, 3


def test_a_destination_twice_within_a_larger_block():
    program = kvplan.compile(tokens(8, 4), tokens(4, 16))
    assert program.plan(range(4), [2, 2][:1]).units == 4
    with pytest.raises(
        kvplan.OverlapError, match=r"block 2 \(unit 1 of it\) .*, as dst_blocks\[0\] and dst_blocks\[1\]"
    ):
        program.plan(range(6), [2, 3, 2][::2], dst_skip=1)
    # The first block from unit 2, the last up to unit 2: one block, named twice, no unit twice.
    assert program.plan(range(4), [2, 2], dst_skip=2).units == 4


@pytest.mark.parametrize(
    ("src", "dst", "dst_skip", "right"),
    [(4, 4, 0, "1 dst block "), (5, 3, 0, "2 dst blocks"), (3, 1, 3, "2 dst blocks")],
)
def test_the_number_of_blocks_that_a_message_gives_is_right(src, dst, dst_skip, right):
    program = kvplan.compile(tokens(8, 4), tokens(8, 16))
    with pytest.raises(kvplan.BlockIndexError, match=f"; give {right}"):
        program.plan(range(src), range(dst), dst_skip=dst_skip)
    assert program.plan(range(src), range(int(right.split()[0])), dst_skip=dst_skip).units == src


@pytest.mark.parametrize("page", [512, 1024])
@pytest.mark.parametrize("units", [1, 3])
def test_vllm_s_cases(page, units, executor):
    """vLLM 0.33's handler tests, as facts: pages of 512 and 1,024 bytes, 1 and 3 units a block, entering in the middle
    of the first, three groups of which one is empty and one unaligned, bytes outside untouched."""
    rng = np.random.default_rng(0)
    gpus = [rng.integers(0, 255, (2, 32, page), np.uint8) for _ in range(3)]  # layer, block, page
    hosts = [np.full((12, units, 2, page), 9, np.uint8) for _ in range(3)]  # block, unit, layer, page
    notation = "layer block token dim", "block token layer dim"
    programs = [
        kvplan.compile(
            KVLayout.from_tensors(notation[0], gpu.reshape(2, 32, 1, page)), KVLayout.from_tensors(notation[1], host)
        )
        for gpu, host in zip(gpus, hosts, strict=True)
    ]
    skip = min(1, units - 1)
    ids = [list(range(3, 3 + 2 * units)), [], [30, 7, 11, 2][: 2 * units - skip]]
    blocks = [[5, 2], [], [8, 1]]
    plans = [
        program.plan(gpu_ids, host_ids[: -(-(len(gpu_ids) + s) // units)], dst_skip=s)
        for program, gpu_ids, host_ids, s in zip(programs, ids, blocks, (0, 0, skip), strict=True)
    ]
    joined = kvplan.join(plans)
    assert joined.units == sum(map(len, ids))
    assert executor.submit(joined).result().nbytes == joined.units * 2 * page
    for gpu, host, gpu_ids, host_ids, s in zip(gpus, hosts, ids, blocks, (0, 0, skip), strict=True):
        expected = np.full_like(host, 9)
        for k, block in enumerate(gpu_ids):
            at = k + s
            expected[host_ids[at // units], at % units] = gpu[:, block]
        np.testing.assert_array_equal(host, expected)


def test_consecutive_blocks_merge_on_both_sides():
    one, two = tokens(8, 16, 64), tokens(8, 16, 64)
    d = kvplan.compile(one, two).plan([3, 4, 6, 0, 1], [0, 1, 2, 6, 7]).descriptors()
    assert sorted(d.size.tolist()) == [1024, 2048, 2048]


def test_the_k_plane_of_the_last_block_joins_the_v_plane_of_the_first():
    one, two = (KVLayout.from_tensors("kv block token dim", np.zeros((2, 4, 8, 16), np.uint8)) for _ in range(2))
    d = kvplan.compile(one, two).plan(range(4), range(4)).descriptors()
    assert d.size.tolist() == [2 * 4 * 8 * 16]
    assert len(kvplan.compile(one, two).plan([3, 1], [3, 1]).descriptors().size) == 4


def test_the_last_row_of_a_block_joins_the_first_of_the_next():
    hnd = KVLayout.from_tensors("block head token dim", np.zeros((8, 2, 4, 16), np.uint8))
    nhd = KVLayout.from_tensors("block token head dim", np.zeros((8, 4, 2, 16), np.uint8))
    program = kvplan.compile(hnd, nhd)
    assert program.runs == 8
    assert len(program.plan([2, 3, 4], [5, 6, 7]).descriptors().size) == 3 * 8 - 2
    assert len(program.plan([2, 3, 4], [5, 7, 6]).descriptors().size) == 3 * 8


def test_joined_plans_merge_with_one_another():
    program = kvplan.compile(tokens(8, 16, 64), tokens(8, 16, 64))
    joined = kvplan.join([program.plan([1], [4]), program.plan([], []), program.plan([2], [5])])
    assert joined.descriptors().size.tolist() == [2048]
    assert (joined.units, joined.nbytes) == (2, 2048)
    assert repr(joined) == "Plan(host of 2 units, 2048 bytes)"


def test_a_plan_joined_with_empty_ones_is_that_plan():
    program = kvplan.compile(tokens(8, 16, 64), tokens(8, 16, 64))
    moving, empty = program.plan([1, 2], [4, 5]), program.plan([], [])
    assert kvplan.join([empty, moving, empty]) is moving
    assert kvplan.join([empty, empty]) is empty


def test_plans_of_overlaid_groups_may_share_an_allocation_but_no_byte():
    memory = np.zeros(64 * 96, np.uint8)
    full = KVLayout.from_tensors("block dim", memory.reshape(64, 96))
    window = KVLayout.from_tensors("block dim", memory.reshape(32, 192))
    host = tokens(64, 1, 96, "block token dim"), tokens(32, 1, 192, "block token dim")
    flat = [KVLayout.from_tensors("block dim", np.zeros((n, d), np.uint8)) for n, d in ((64, 96), (32, 192))]
    assert [h.num_blocks for h in host] == [64, 32]
    loads = kvplan.compile(flat[0], full), kvplan.compile(flat[1], window)
    joined = kvplan.join([loads[0].plan([0, 1], [2, 9]), loads[1].plan([0], [2])])
    assert joined.nbytes == 2 * 96 + 192
    with pytest.raises(kvplan.OverlapError, match="write address"):
        kvplan.join([loads[0].plan([0], [5]), loads[1].plan([0], [2])])


def test_seams_cut_what_would_merge():
    memory = np.zeros((8, 16, 64), np.uint8)
    start = memory.ctypes.data
    src = tokens(8, 16, 64)
    dst = KVLayout.from_tensors("block token dim", memory, seams=(start + 2 * 1024, start + 4 * 1024 + 100, start))
    assert dst.seams == (start, start + 2048, start + 4196)
    plan = kvplan.compile(src, dst).plan(range(8), range(8))
    d = plan.descriptors()
    assert sorted((d.dst - start).tolist()) == [0, 2048, 4196]
    assert sorted(d.size.tolist()) == [2048, 2148, 3996]
    assert oracle.strided_moves(plan.strided()) == oracle.byte_moves(d)
    reverse = kvplan.compile(dst, src).plan(range(8), range(8))
    assert sorted((reverse.descriptors().src - start).tolist()) == [0, 2048, 4196]


def test_a_cap_cuts_from_the_front():
    plan = kvplan.compile(tokens(8, 16, 64), tokens(8, 16, 64)).plan(range(4), range(4))
    assert plan.descriptors(max_nbytes=1500).size.tolist() == [1500, 1500, 1096]
    assert plan.descriptors(max_nbytes=4096).size.tolist() == [4096]


def test_strided_rows_by_name():
    src = KVLayout.from_tensors("layer: block token dim", list(np.zeros((3, 8, 4, 16), np.uint8)))
    dst = KVLayout.from_tensors("block layer token dim", np.zeros((8, 3, 4, 16), np.uint8))
    rows = kvplan.compile(src, dst).plan([5, 1], [0, 7]).strided()
    assert rows.shape == (2, 6)
    assert rows.dtype == np.int64
    assert rows.src.tolist() == [src.address(layer=0, part="kv", block=b) for b in (5, 1)]
    assert rows.dst.tolist() == [dst.address(layer=0, part="kv", block=b) for b in (0, 7)]
    assert [rows.width[0], rows.height[0], rows.src_pitch[0], rows.dst_pitch[0]] == [64, 3, 512, 64]


# ---- fast paths next to their slow twins ------------------------------------------------------------------------


def test_the_loops_report_bad_ids_uncompiled_too():
    program = kvplan.compile(tokens(4, 4), tokens(4, 4))
    larger = kvplan.compile(tokens(8, 4), tokens(4, 8))
    with uncompiled():
        for src, dst in (([-1], [0]), ([0], [4]), ([0, 1], [2, 2])):
            with pytest.raises(kvplan.KVPlanError):
                program.plan(src, dst)
        with pytest.raises(kvplan.OverlapError):
            larger.plan(range(4), [2, 2])


def test_scratch_grows_with_the_pool():
    assert placement._Scratch().of(10_000).size * 64 >= 10_000
    program = kvplan.compile(tokens(9, 1, 1), tokens(9000, 1, 1))
    with pytest.raises(kvplan.OverlapError):
        program.plan([0, 1], [8999, 8999])
    assert program.plan([0, 1], [8999, 0]).units == 2


def test_the_twin_of_nothing():
    none = np.empty(0, np.int64)
    assert [c.size for c in loops_numpy.merge_adjacent(none, none, none)] == [0, 0, 0]


def test_units_of_larger_blocks_leave_the_scratch_clean():
    program = kvplan.compile(tokens(40, 1), tokens(20, 2))
    for _ in range(2):
        for order in ([5, 3, 9], [9, 5, 3]):
            assert program.plan(range(6), order).units == 6
        with pytest.raises(kvplan.OverlapError):
            program.plan(range(6), [7, 3, 7])


def test_scratch_holds_a_bit_a_unit():
    program = kvplan.compile(tokens(2, 1, 1), tokens(3000, 4, 1))
    assert program.plan([0, 1], [2999], dst_skip=2).units == 2
    assert placement._scratch.words.size * 64 >= 1
    larger = kvplan.compile(tokens(12000, 1, 1), tokens(3000, 4, 1))
    order = list(range(2999, -1, -1))
    assert larger.plan(range(12000), order).units == 12000
    assert placement._scratch.words.size * 64 >= 12000


def test_joined_plans_may_not_read_what_they_write():
    layout = tokens(8, 4)
    program = kvplan.compile(layout, layout)
    assert program.plan([1], [0]).units == 1
    with pytest.raises(kvplan.OverlapError, match="reads and writes"):
        kvplan.join([program.plan([0], [4]), program.plan([5], [0])])
    # A long read that begins early reaches over a short one that begins late.
    rows = KVLayout.from_tensors("block dim", np.zeros(64, np.uint8).reshape(8, 8))
    both = kvplan.compile(rows, rows)
    with pytest.raises(kvplan.OverlapError, match="reads and writes"):
        kvplan.join([both.plan([0, 1, 2, 3], [4, 5, 6, 7]), both.plan([5], [2])])


def test_strided_rows_of_a_destination_that_runs_backwards():
    memory = np.zeros((3, 4, 8), np.uint8)
    src = KVLayout.from_tensors("layer: block dim", list(np.zeros((3, 4, 8), np.uint8)))
    dst = KVLayout.from_tensors("layer: block dim", [memory[k] for k in (2, 1, 0)])
    plan = kvplan.compile(src, dst).plan([1, 3], [0, 2])
    assert min(loop[2] for part in plan.parts for run in part.group.runs for loop in run.loops) < 0
    assert oracle.strided_moves(plan.strided()) == oracle.byte_moves(plan.descriptors())
    assert (plan.strided().height == 1).all()


@pytest.mark.parametrize("cap", [2**62, 2**63, 2**70])
def test_caps_beyond_every_size_cut_nothing(cap):
    memory = np.zeros((4, 16), np.uint8)
    dst = KVLayout.from_tensors("block dim", memory, seams=(memory[2:].ctypes.data,))
    plan = kvplan.compile(tokens(4, 1, 16), KVLayout.from_tensors("block token dim", memory.reshape(4, 1, 16)))
    assert plan.plan(range(4), range(4)).descriptors(max_nbytes=cap).size.tolist() == [64]
    assert dst.seams


def test_programs_of_many_joints_sort_instead():
    rng = np.random.default_rng(0)

    def scattered(notation, shape):
        memory = [np.zeros(shape, np.uint8) for _ in range(12)]
        return KVLayout.from_tensors(notation, [memory[k] for k in rng.permutation(12)])

    src = scattered("block: layer head token dim", (4, 2, 8, 4))
    dst = scattered("block: layer token head dim", (4, 8, 2, 4))
    plan = kvplan.compile(src, dst).plan(range(12), rng.permutation(12))
    assert by_dst(plan.descriptors()) == by_dst(twin_of(plan))


@pytest.mark.parametrize("ids", [torch.zeros(2, requires_grad=True), torch.zeros(2, dtype=torch.bfloat16),
                                 torch.eye(2).to_sparse()])  # fmt: skip
def test_torch_tensors_that_hold_no_ids(ids):
    with pytest.raises(kvplan.BlockIndexError):
        kvplan.compile(tokens(4, 4), tokens(4, 4)).plan(ids, [0, 1])
