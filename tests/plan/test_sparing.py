"""Little work without numba: equal to what the compiled loops do, and chosen only where it was asked for."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.cli import main
from kvplan.cost.statistics import chains, follow, statistics_of
from kvplan.execute.host import memcpy, memmove, tasks
from kvplan.plan import loops, loops_numba, loops_numpy
from kvplan.plan.loops import LITTLE, loops_for, spares, sparing
from tests import oracle
from tests.commands import GPU, HOST
from tests.laws.test_laws import by_dst
from tests.laws.test_laws import compiled as compiled_case
from tests.plan.test_statistics import LAYERED, PAGED, zeros
from tests.strategies import cases, neighbour_cases


@contextmanager
def without_numba():
    """As in a process that has not loaded the compiled loops and spares them."""
    with pytest.MonkeyPatch.context() as patch, sparing():
        patch.setattr(loops, "loaded", None)
        patch.setitem(sys.modules, "kvplan.plan.loops_numba", None)  # who asks for it fails
        patch.delattr(kvplan.plan, "loops_numba")
        yield


@given(case=st.one_of(cases(), neighbour_cases()))
def test_law_3_without_numba(case):
    _, _, program, plan = compiled_case(case)
    flat, capped = by_dst(plan.descriptors()), by_dst(plan.descriptors(max_nbytes=7))
    numbers, rows = statistics_of(plan), plan.strided().tolist()
    with without_numba():
        again = program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
        assert by_dst(again.descriptors()) == flat
        assert by_dst(again.descriptors(max_nbytes=7)) == capped
        assert statistics_of(again) == numbers
        assert again.strided().tolist() == rows
    for part, other in zip(plan.parts, again.parts, strict=True):
        np.testing.assert_array_equal(part.units, other.units)


def test_seams_cut_rows_without_numba():
    src, dst = (np.zeros((2, 4, 4, 8), np.uint8) for _ in range(2))
    seam = src.ctypes.data + 4 * 4 * 8 + 20
    sides = (KVLayout.from_tensors("layer block token dim", t, seams=s) for t, s in ((src, (seam,)), (dst, ())))
    plan = kvplan.compile(*sides).plan([0, 2], [1, 0])
    rows, flat = plan.strided().tolist(), by_dst(plan.descriptors())
    with without_numba():
        assert plan.strided().tolist() == rows
        assert by_dst(plan.descriptors()) == flat
    assert len(flat) == 5  # 2 layers x 2 blocks, and a cut


@given(
    src=st.lists(st.integers(-2, 9), max_size=6), dst=st.lists(st.integers(-2, 5), max_size=6),
    tokens=st.sampled_from([(4, 4), (4, 8), (8, 4), (4, 12)]), skips=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)  # fmt: skip
@example(src=[0, 1, 2, 3], dst=[2, 2], tokens=(4, 8), skips=(0, 0))
@example(src=[1, -1], dst=[7, 7], tokens=(4, 4), skips=(0, 0))
def test_ids_are_refused_in_the_same_words(src, dst, tokens, skips):
    sides = [KVLayout.from_tensors("block token dim", np.zeros((6, size, 8), np.uint8)) for size in tokens]
    program = kvplan.compile(*sides)

    def planned():
        try:
            return [part.units.tolist() for part in program.plan(src, dst, *skips).parts]
        except kvplan.KVPlanError as error:
            return type(error), str(error)

    expected = planned()
    with without_numba():
        assert planned() == expected


@given(
    starts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=9, unique_by=lambda s: s[1]),
    nbytes=st.sampled_from((8, 16)), first=st.integers(0, 3), step=st.integers(1, 3),
)  # fmt: skip
def test_the_loops_of_statistics_and_their_twins(starts, nbytes, first, step):
    units = np.array(starts, dtype=np.int64).T * [[8], [nbytes]]  # no two destinations overlap
    count = units.shape[1]
    found, repeated, reach = loops_numpy.adjacency(units, nbytes, None)
    marks = np.zeros(1 << (16 * count).bit_length(), np.uint8)
    hashed = loops_numba.adjacency(units, nbytes, marks)
    assert (found, reach) == (hashed[0], hashed[2])
    assert found <= repeated <= hashed[1], "of two shifts that fall on one mark, the second counts as repeated"
    assert loops_numba.adjacency(units, nbytes, np.zeros(2, np.uint8))[1] >= count - 2
    assert loops_numpy.rising(units[0], first, step, nbytes) == loops_numba.rising(units[0], first, step, nbytes)
    slots = np.empty(1 << (2 * count - 1).bit_length(), dtype=np.int32)
    made = []
    for which in (loops_numpy, loops_numba):
        out = np.zeros((3, count), dtype=np.int64)
        left = which.chain(units, nbytes, slots, out)
        made.append(sorted(out[:, :left].T.tolist()))
    assert made[0] == made[1]


def test_units_that_touch_are_one_chain_without_numba():
    units = np.array([[128, 0, 64], [192, 64, 128]])
    with without_numba():
        assert chains(units, 64) == 1
    part = statistics_part()
    assert follow(*part) == 2
    with without_numba():
        assert follow(*part) == 2


def statistics_part():
    """A store of blocks 0 to 2 onto neighbouring host blocks: two of them follow another."""
    from kvplan.cost.statistics import facts_of
    from tests.simulated.objects import Tensor

    sides = (
        KVLayout.from_tensors(LAYERED, Tensor(zeros(4, 8, 16, 64))),
        KVLayout.from_tensors(PAGED, zeros(8, 4, 16, 64)),
    )
    plan = kvplan.compile(*sides).plan([0, 1, 2], [4, 5, 6])
    part = plan.parts[0]
    return part, facts_of(part.group, "store"), "store", (0, 0)


# ---- what is chosen, and when ------------------------------------------------------------------------------------


def test_only_little_work_is_spared_and_only_where_asked():
    assert not spares(0)
    with sparing():
        assert spares(LITTLE)
        assert not spares(LITTLE + 1)
        with sparing(wanted=False):
            assert not spares(0)
        assert spares(0)
    assert not spares(0)


def test_loops_that_are_loaded_are_used(monkeypatch):
    with sparing():
        assert loops_for(1) is loops_numba
        monkeypatch.setattr(loops, "loaded", None)
        assert loops_for(1) is loops_numpy
        assert loops_for(LITTLE + 1) is loops_numba
        assert loops_for(1) is loops_numba  # it is loaded now
    monkeypatch.setattr(loops, "loaded", None)
    assert loops_for(1) is loops_numba


# ---- the host path -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def light():
    """An executor of a process that spares numba."""
    with sparing():
        executor = kvplan.Executor(policy=kvplan.Policy(threads=2))
    with executor:
        yield executor


@given(case=st.one_of(cases(), neighbour_cases()))
def test_laws_1_and_2_by_memmove(case, light):
    src, dst, _, plan = compiled_case(case)
    expected = case.dst.build(case.seed + 1)
    oracle.copy(src, expected, case.src_ids, case.dst_ids, case.src_skip, case.dst_skip, case.unit_tokens, case.units)
    result = light.submit(plan).result()
    with sparing(wanted=False):
        assert result.descriptors == tasks.tasks_of(plan)[1]
    for got, want in zip(dst.roots, expected.roots, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("hands", [memcpy, memmove])
@pytest.mark.parametrize(("first", "last"), [(0, 6), (1, 5), (2, 3), (4, 4), (0, 0)])
def test_some_of_the_copies_of_a_part(hands, first, last):
    src, dst = np.arange(1, 49, dtype=np.uint8), np.zeros(48, np.uint8)
    units = np.array([[0, 16, 32]] * 2) + np.array([[src.ctypes.data], [dst.ctypes.data]])
    runs = (np.array([0, 8]), np.array([8, 0]), np.array([4, 8]))  # 0-3 to 8-11, 8-15 to 0-7 of each unit
    hands.copy_units(units, *runs, first, last, streaming=False)
    expected = np.zeros(48, np.uint8)
    for at in range(first, last):
        unit, run = 16 * (at // 2), at % 2
        if run == 0:
            expected[unit + 8 : unit + 12] = src[unit : unit + 4]
        else:
            expected[unit : unit + 8] = src[unit + 8 : unit + 16]
    np.testing.assert_array_equal(dst, expected)


@pytest.mark.parametrize("wanted", [True, False])
def test_an_executor_moves_as_whoever_made_it_asked(monkeypatch, wanted):
    called = []
    for hands in (memcpy, memmove):

        def counted(*given, hands=hands, move=hands.copy_units):
            called.append(hands.__name__)
            return move(*given)

        monkeypatch.setattr(hands, "copy_units", counted)
    src, dst = np.arange(32, dtype=np.uint8).reshape(4, 8), np.zeros((4, 8), np.uint8)
    plan = kvplan.compile(*(KVLayout.from_tensors("block dim", t) for t in (src, dst))).plan([1, 3], [0, 2])
    with sparing(wanted=wanted):
        executor = kvplan.Executor()
    with executor:
        executor.submit(plan).result()
    assert set(called) == {f"kvplan.execute.host.{'memmove' if wanted else 'memcpy'}"}
    np.testing.assert_array_equal(dst[[0, 2]], src[[1, 3]])


def test_runs_longer_than_a_task_by_memmove(light, monkeypatch):
    monkeypatch.setattr(tasks, "TASK_NBYTES", 1000)
    src, dst = np.random.default_rng(0).integers(0, 256, (4, 3333), np.uint8), np.zeros((4, 3333), np.uint8)
    plan = kvplan.compile(*(KVLayout.from_tensors("block dim", t) for t in (src, dst))).plan([3, 0], [1, 2])
    assert light.submit(plan).result().descriptors == 8
    np.testing.assert_array_equal(dst, np.stack((dst[0] * 0, src[3], src[0], dst[3] * 0)))


def test_a_large_plan_on_the_command_line_is_the_same(capsys):
    """Beyond LITTLE the compiled loops plan; what is printed is what the numpy loops would say."""
    argv = ["plan", GPU, HOST, "--src", "0-449", "--dst", "450-899", "--json"]
    assert LITTLE < 450 * 160
    assert main(argv) == 0
    large = capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "LITTLE", 1 << 20)
        with without_numba():
            assert main(argv) == 0
    assert capsys.readouterr().out == large
