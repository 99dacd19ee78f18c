"""Law 3, staged: two steps by way of a ring are the byte moves of the plan."""

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
from tests.compiled_cases import planned
from tests.profiles import examples
from tests.strategies import cases, neighbour_cases

RING = 1 << 50  # an address that no cache has


loads = st.booleans()


@examples(250)
@given(case=st.one_of(cases(), neighbour_cases()), load=loads)
def test_the_two_steps_of_a_staged_unit_are_its_byte_moves(case, load):
    """Law 3: a unit's copy into the ring and the copy out of it are its byte moves."""
    for group, _ in planned(case).parts:
        check_two_steps(group, load=load)


@pytest.mark.parametrize("load", [True, False])
def test_units_whose_runs_are_neighbours_of_other_units_runs(load):
    """Law 3 for tokens every 16 bytes and heads every 24, of 8: the second run of a unit touches the first of the next.

    So the units of a block do not keep their distances in the ring.
    """
    host = np.lib.stride_tricks.as_strided(np.zeros(2 * 48, np.uint8), (2, 2, 2, 8), (48, 16, 24, 1))
    cache = np.zeros((6, 1, 2, 8), np.uint8)
    sides = [KVLayout.from_tensors("block token head dim", side) for side in (host, cache)]
    program = kvplan.compile(*(sides if load else sides[::-1]))
    check_two_steps(program.program.groups[0], load=load)


def check_two_steps(group, *, load: bool) -> None:
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


@examples(500)
@given(
    case=st.one_of(cases(), neighbour_cases()), load=loads, granules=st.integers(1, 3), slots=st.integers(1, 4),
    first_slot=st.integers(0, 3), extra=st.integers(0, 1),
)  # fmt: skip
def test_dealing_writes_down_every_byte_move_and_what_the_plain_twin_writes(
    case, load, granules, slots, first_slot, extra
):
    """Laws 3 and 8: the loop that deals units out to ring slots, against a plain twin."""
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
