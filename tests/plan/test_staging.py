"""Units by way of a ring: the same byte moves in two steps; and how they are dealt out to its slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.execute.gpu.ring_loops import deal
from kvplan.plan.staging import GRAIN, stage
from tests import oracle
from tests.strategies import cases, layout_of, neighbour_cases

RING = 1 << 50  # an address that no cache has
loads = st.booleans()


def planned(case) -> kvplan.Plan:
    src, dst = layout_of(case.src.build(case.seed)), layout_of(case.dst.build(case.seed + 1))
    return kvplan.compile(src, dst).plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)


def layouts(host_tokens: int) -> tuple[kvplan.KVLayout, kvplan.KVLayout]:
    cache = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 4, 30), np.int8))
    return cache, kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((3, 2, host_tokens, 30), np.int8))


def test_a_host_block_is_one_granule_of_one_extent():
    cache, host = layouts(8)
    made = stage(kvplan.compile(cache, host).program.groups[0], host_is_src=False)
    assert (made.granule_units, made.nbytes) == (2, 512)
    assert made.extents.tolist() == [[0], [0], [480]]  # two layers of 8 tokens of 30 bytes, padded to 512
    assert made.runs.tolist() == [[0, 240], [0, 8 * 4 * 30], [120, 120]]
    assert made.unit_hosts.tolist() == made.unit_rings.tolist() == [0, 120]
    # One unit alone: its two layers, where they lie in the whole block.
    assert made.part(1, 2).tolist() == [[120, 360], [120, 360], [120, 120]]
    assert made.part(0, 2) is made.extents
    assert made.part(1, 2) is made.part(1, 2)
    assert made.alignment == 8  # of 120, and addresses at least so round


def test_units_that_lie_apart_on_the_host_are_padded_apart_in_the_ring():
    cache = kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 4, 100), np.int8))
    host = kvplan.KVLayout.from_tensors("block token dim", np.zeros((3, 4, 128), np.int8)[:, :, :100])
    made = stage(kvplan.compile(host, cache).program.groups[0], host_is_src=True)
    assert made.extents.tolist() == [[0, 128, 256, 384], [0, 256, 512, 768], [100] * 4]
    assert made.nbytes == 1024


def test_a_load_is_laid_out_by_the_units_of_its_source():
    cache, host = layouts(8)
    made = stage(kvplan.compile(host, cache).program.groups[0], host_is_src=True)
    assert (made.granule_units, made.nbytes) == (2, 512)
    assert made.extents.tolist() == [[0], [0], [480]]
    assert made.runs.tolist() == [[0, 240], [0, 8 * 4 * 30], [120, 120]]
    assert made.unit_hosts.tolist() == made.unit_rings.tolist() == [0, 120]


def test_units_whose_runs_are_neighbours_of_other_units_runs_go_one_by_one():
    """Tokens every 16 bytes and heads every 24, of 8 bytes: at 0 and 24, and at 16 and 40; the middle ones touch.

    In the ring, the first unit's second row would lie 264 bytes behind its first, and the other's 256.
    """
    memory = np.zeros(2 * 48, np.uint8)
    host = KVLayout.from_tensors(
        "block token head dim", np.lib.stride_tricks.as_strided(memory, (2, 2, 2, 8), (48, 16, 24, 1))
    )
    cache = KVLayout.from_tensors("block token head dim", np.zeros((6, 1, 2, 8), np.uint8))
    for src, dst in ((host, cache), (cache, host)):
        made = stage(kvplan.compile(src, dst).program.groups[0], host_is_src=src is host)
        assert (made.granule_units, made.nbytes) == (1, 512)
        assert made.unit_hosts.tolist() == made.unit_rings.tolist() == [0]
        assert made.extents.tolist() == [[0, 24], [0, 256], [8, 8]]
        assert made.runs.tolist() == [[0, 256], [0, 8], [8, 8]]


@pytest.mark.parametrize("load", [True, False])
@pytest.mark.parametrize(("host_at", "cache_at", "alignment"), [(0, 0, 64), (8, 0, 64), (0, 8, 8), (0, 32, 32)])
def test_the_ring_s_kernel_is_aligned_as_the_cache_is_wherever_the_host_s_memory_lies(
    load, host_at, cache_at, alignment
):
    """Addresses of the ring are round; the host's side is copied by others."""
    sides = []
    for at in (host_at, cache_at):
        memory = np.zeros(1024, np.uint8)
        start = -memory.ctypes.data % 256 + at
        sides.append(KVLayout.from_tensors("block dim", memory[start : start + 4 * 64].reshape(4, 64)))
    host, cache = sides
    program = kvplan.compile(host, cache) if load else kvplan.compile(cache, host)
    assert stage(program.program.groups[0], host_is_src=load).alignment == alignment


@given(case=st.one_of(cases(), neighbour_cases()), load=loads)
def test_law_3_the_two_steps_of_a_staged_unit_are_its_byte_moves(case, load):
    plan = planned(case)
    for group, _ in plan.parts:
        made = stage(group, host_is_src=load)
        src, dst, size = group.offsets
        host, cache = (src, dst) if load else (dst, src)
        for unit in range(made.granule_units):
            direct = ranges(host + made.unit_hosts[unit], cache, size)
            extents = made.part(unit, unit + 1)
            there = ranges(*extents)
            onward = ranges(made.runs[0] + made.unit_rings[unit], *made.runs[1:])
            back = {ring: at for at, ring in there.items()}
            assert len(back) == len(there), "two bytes of the host in one place"
            assert {back[ring]: at for ring, at in onward.items()} == direct
            assert there.keys() == direct.keys(), "the host's image, and no more"
        whole = ranges(*made.extents)
        assert len(set(whole.values())) == len(whole)
        assert max(whole.values()) < made.nbytes
        images = [key for unit in range(made.granule_units) for key in ranges(*made.part(unit, unit + 1)).items()]
        assert sorted(images) == sorted(whole.items()), "units of a granule share its image out"
        assert (made.extents[1] % GRAIN == 0).all()
        assert made.nbytes % GRAIN == 0
        for column in (made.runs, made.unit_rings):
            assert (column % made.alignment == 0).all()


def ranges(first, second, size) -> dict[int, int]:
    return {a + k: b + k for a, b, n in zip(*map(np.ndarray.tolist, (first, second, size)), strict=True)
            for k in range(n)}  # fmt: skip


@given(
    case=st.one_of(cases(), neighbour_cases()), load=loads, granules=st.integers(1, 3), slots=st.integers(1, 4),
    first_slot=st.integers(0, 3), extra=st.integers(0, 1),
)  # fmt: skip
def test_dealing_writes_down_every_byte_move_and_what_the_plain_twin_writes(
    case, load, granules, slots, first_slot, extra
):
    plan = planned(case)
    for part, skips in zip(plan.parts, plan.skips, strict=True):
        count = part.units.shape[1]
        if not count:
            continue
        staging = stage(part.group, host_is_src=load)
        per = staging.granule_units
        skip = skips[0 if load else 1] if per > 1 else 0
        last, end = divmod(count - 1 + skip, per)
        head, tail = staging.part(skip, end + 1 if last == 0 else per), staging.part(0, end + 1)
        slot_nbytes = granules * staging.nbytes
        template = np.array([0, 7, 1, 0, 0, 70, 80, 90], np.int64)
        chunks = last // granules + 1
        total = head.shape[1] + max(last - 1, 0) * staging.extents.shape[1] + (tail.shape[1] if last else 0)
        words = np.full(8 * chunks + 2 * count + 1, -1, np.int64)
        made, edges = np.full((3, extra + total), -1, np.int64), np.full(chunks + 1, -1, np.int64)
        given_ = (
            part.units, load, skip, per, staging.unit_hosts, staging.unit_rings, head, staging.extents, tail,
            RING, slots, slot_nbytes, first_slot % slots, staging.nbytes, granules, template, 1 << 40,
        )  # fmt: skip
        deal(*given_, words, made, extra, edges)
        assert words[-1] == -1
        assert (made[:, :extra] == -1).all()
        assert (made[:, edges[-1] :] == -1).all()
        assert twin(*given_) == (words[:-1].tolist(), made[:, extra : edges[-1]].T.tolist(), (edges - extra).tolist())
        if slots * granules > last:  # all at once in the ring: both steps together are the part's own moves
            there = oracle.byte_moves(made[:, extra : edges[-1]])
            units = words[8 * chunks : -1].reshape(2, count)
            runs = staging.runs if load else staging.runs[[1, 0, 2]]
            ours = [(a + src, b + dst, n) for a, b in units.T.tolist() for src, dst, n in runs.T.tolist()]
            onward = oracle.byte_moves(np.array(ours, np.int64).reshape(-1, 3).T)
            first, second = (there, onward) if load else (onward, there)
            src, dst, size = part.group.offsets
            own = [(a + s, b + d, n) for a, b in part.units.T.tolist()
                   for s, d, n in zip(src.tolist(), dst.tolist(), size.tolist(), strict=True)]  # fmt: skip
            assert {at: first[ring] for at, ring in second.items()} == oracle.byte_moves(np.array(own, np.int64).T)


def twin(
    units, load, skip, per, unit_hosts, unit_rings, head, middle, tail, ring, slots, slot_nbytes, first_slot,
    granule_nbytes, granules, template, address,
):  # fmt: skip
    """The dealing, in plain Python: granule by granule."""
    count = units.shape[1]
    host, cache = (units[0], units[1]) if load else (units[1], units[0])
    numbered = [divmod(unit + skip, per) for unit in range(count)]
    last = numbered[-1][0]
    chunks = last // granules + 1
    moves, edges, sides = [], [], [[], []]
    headers = []
    for chunk in range(chunks):
        edges.append(len(moves))
        mine = [unit for unit, (granule, _) in enumerate(numbered) if granule // granules == chunk]
        words = template.tolist()
        words[0] = len(mine)
        words[3] = address + 8 * (8 * chunks + mine[0])
        words[4] = words[3] + 8 * count
        headers += words
        for granule in range(chunk * granules, min((chunk + 1) * granules, last + 1)):
            place = ring + (first_slot + chunk) % slots * slot_nbytes + granule % granules * granule_nbytes
            inside = [(unit, inner) for unit, (its, inner) in enumerate(numbered) if its == granule]
            start = int(host[inside[0][0]] - unit_hosts[inside[0][1]])
            for at, to, nbytes in (head if granule == 0 else tail if granule == last else middle).T.tolist():
                move = [start + at, place + to, nbytes] if load else [place + to, start + at, nbytes]
                before = moves[-1] if len(moves) > edges[-1] else [0, 0, 0]
                if [before[0] + before[2], before[1] + before[2]] == move[:2]:
                    before[2] += nbytes  # they touch on both sides
                else:
                    moves.append(move)
            sides[0] += [int(place + unit_rings[inner]) for _, inner in inside]
            sides[1] += [int(cache[unit]) for unit, _ in inside]
    edges.append(len(moves))
    return headers + (sides[0] + sides[1] if load else sides[1] + sides[0]), moves, edges


@pytest.mark.parametrize("dealing", [deal, deal.py_func], ids=["compiled", "as written"])
@pytest.mark.parametrize("load", [True, False])
def test_dealing_by_hand(load, dealing):
    """Three units, two a granule, entered one late: granules of 1 and 2 units, one a chunk, two slots."""
    units = np.array([[120, 300, 420], [9000, 9500, 9100]], np.int64)[:: 1 if load else -1].copy()
    head, whole = np.array([[120], [120], [120]]), np.array([[0], [0], [240]])
    words, made, edges = np.zeros(16 + 6, np.int64), np.zeros((3, 2), np.int64), np.zeros(3, np.int64)
    dealing(units, load, 1, 2, np.array([0, 120]), np.array([0, 120]), head, whole, whole, 10_000, 2, 256, 1, 256, 1,
         np.array([0, 2, 1, 0, 0, 5, 6, 7]), 500, words, made, 0, edges)  # fmt: skip
    ring, cache = [10_000 + 256 + 120, 10_000, 10_000 + 120], [9000, 9500, 9100]
    assert words[16:].tolist() == (ring + cache if load else cache + ring)
    assert words[:8].tolist() == [1, 2, 1, 500 + 128, 500 + 128 + 24, 5, 6, 7]
    assert words[8:16].tolist() == [2, 2, 1, 500 + 136, 500 + 136 + 24, 5, 6, 7]
    host, place = [120, 300], [10_000 + 256 + 120, 10_000]
    assert made.tolist() == [*((host, place) if load else (place, host)), [120, 240]]
    assert edges.tolist() == [0, 1, 2]
