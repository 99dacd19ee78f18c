"""Law 3, staged: two steps by way of a ring are the byte moves of the plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.cuda.rows import BATCH, COPY, LAUNCH, RECORD, SYNC, WAIT
from kvplan.execute.gpu import row_loops
from kvplan.plan.packing import GRAIN, stage
from tests import oracle
from tests.compiled_cases import planned
from tests.profiles import examples
from tests.simulated.kernel import words as memory
from tests.strategies import cases, neighbour_cases

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
    src, dst, size = group.packed
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


RING, HEADERS, UNIT = 1 << 50, 1 << 40, 8  # addresses that no cache has; bytes of a word
BEGIN, END = 98, 99  # events
COPY_STREAM, KERNEL_STREAM, OTHER_STREAM = 80, 81, 82


@examples(500)
@given(
    case=st.one_of(cases(), cases(max_blocks=9), neighbour_cases()), load=loads, granules=st.integers(1, 3),
    slots=st.integers(1, 4), first_slot=st.integers(0, 3), late=st.booleans(), other=st.booleans(),
    seamed=st.booleans(), least=st.sampled_from((0, 8, 1 << 62)), most=st.integers(1, 4),
)  # fmt: skip
def test_the_calls_of_chunks_carry_out_the_plan_and_the_compiled_loop_is_its_plain_twin(
    case, load, granules, slots, first_slot, late, other, seamed, least, most
):
    """Laws 3, 7 and 8: the loop that writes the calls of chunks."""
    plan = planned(case)
    for (group, addresses), skips in zip(plan.parts, plan.skips, strict=True):
        if not addresses.shape[1]:
            continue
        made, units, line = (
            stage(group, host_is_src=load),
            np.ascontiguousarray(addresses),
            np.array([0] * 10 + [32, 0, 1]),
        )
        count, per = units.shape[1], made.granule_units
        skip = skips[0 if load else 1] if per > 1 else 0
        last, end = divmod(count - 1 + skip, per)
        some = [made.part(skip, end + 1 if last == 0 else per), made.extents, made.part(0, end + 1)]
        heads, middles, tails = (one.shape[1] for one in some)
        seams = np.unique(np.sort(units[0 if load else 1])[::2] + 3) if seamed else np.empty(0, np.int64)
        chunks, two = last // granules + 1, other and load and last >= granules

        def write(loop, made=made, some=some, units=units, skip=skip, seams=seams, chunks=chunks, last=last, two=two,
                  line=line, at=(0, heads, heads + middles, heads + middles + tails)):  # fmt: skip
            heads, middles, tails = np.diff(at)
            most_extents = heads + max(last - 1, 0) * middles + (tails if last else 0) + (last + 1) * seams.size
            words = np.full(9 * chunks + 2 * units.shape[1], -1)
            columns, edges = np.empty((3, most_extents), np.int64), np.empty(chunks + 1, np.int64)
            rows = np.empty((most_extents + 8 * chunks + 8, 8), np.int64)
            written = loop(
                units, load, skip, made.granule_units, made.unit_hosts, made.unit_rings, np.concatenate(some, axis=1),
                np.array(at), seams, RING, granules * made.nbytes, first_slot % slots, np.arange(100, 100 + slots),
                np.arange(200, 200 + slots), made.nbytes, granules, line, 1, HEADERS - 8, HEADERS, words.nbytes, words,
                least, most, COPY_STREAM, KERNEL_STREAM, OTHER_STREAM if two else KERNEL_STREAM, 77 if two else 0, late,
                BEGIN, END, columns, edges, rows,
            )  # fmt: skip
            return written, words, columns[:, : written[1]], rows[: written[0]]

        _, words, columns, rows = write(row_loops.write_chunks)
        plain = write(row_loops.write_chunks.py_func)
        assert plain[1].tolist() == words.tolist()
        assert plain[2].tolist() == columns.tolist()
        assert plain[3][:, [0, 1, 5]].tolist() == rows[:, [0, 1, 5]].tolist()  # others are addresses of the columns
        assert (rows[0, 2], rows[-1, 2]) == (BEGIN, END)
        check_waits(rows[1:-1], joined=two)
        runs = made.runs if load else made.runs[[1, 0, 2]]
        src, dst, size = group.packed
        own = [(a + s, b + d, n) for a, b in units.T.tolist()
               for s, d, n in zip(src.tolist(), dst.tolist(), size.tolist(), strict=True)]  # fmt: skip
        at, sizes = columns[0 if load else 1][:, None], columns[2][:, None]
        assert not ((at < seams) & (seams < at + sizes)).any()
        assert carried_out(rows, words, runs, load=load) == oracle.byte_moves(np.array(own, np.int64).T)


def carried_out(rows, words, runs, *, load: bool) -> dict[int, int]:
    """Make the calls in order; return destination byte -> source byte."""
    ring: dict[int, int] = {}
    moves: dict[int, int] = {}
    headers = 0

    def move(src: int, dst: int, nbytes: int) -> None:
        for k in range(nbytes):
            if dst >= RING:
                ring[dst + k] = src + k
            else:
                assert dst + k not in moves, "a byte is written twice"
                moves[dst + k] = ring[src + k]

    for kind, _, one, two, three, four, *_ in rows.tolist():
        if kind == COPY and one == HEADERS:
            headers += 1
        elif kind == COPY:
            move(two, one, three)
        elif kind == BATCH:
            for dst, src, nbytes in zip(*(memory(at, four).tolist() for at in (one, two, three)), strict=True):
                move(src, dst, nbytes)
        elif kind == LAUNCH:
            at = (one - HEADERS) // UNIT
            units = [words[(words[at + 3 + side] - HEADERS) // UNIT :][: words[at]].tolist() for side in (0, 1)]
            for src, dst in zip(*units, strict=True):
                for first, second, nbytes in runs.T.tolist():
                    move(src + first, dst + second, nbytes)
    assert headers == load
    return moves


def check_waits(rows, *, joined: bool) -> None:
    """Each use of a slot waits for the one before: a read for the write, and a write for the last read."""
    recorded, waits = set(), []
    for kind, _, event, *_ in rows.tolist():
        if kind == RECORD:
            recorded.add(event)
        elif kind in (WAIT, SYNC):
            assert event in recorded or event >= 200, "nothing was recorded yet"
            waits.append(event)
    fills = sum(kind == RECORD and 100 <= event < 200 for kind, _, event, *_ in rows.tolist())
    assert sum(100 <= event < 200 for event in waits) == fills
    assert sum(event >= 200 for event in waits) == fills + joined
