"""Transfers of the host path that go first, and transfers that are taken back."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout, TransferError
from tests.execute.host_processes import pair
from tests.patience import PATIENCE, until
from tests.profiles import examples

BLOCKS = 6


@pytest.fixture
def gate():
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def executor(gate):
    with kvplan.Executor(policy=kvplan.Policy(threads=2)) as made:
        yield made
        gate.set()


def test_a_high_one_goes_past_what_waits(executor, gate):
    src, dst, program = pair()
    normal = [executor.submit(program.plan([k], [k]), after=gate if k == 0 else None) for k in range(4)]
    high = executor.submit(program.plan([9], [9]), priority="high")
    high.synchronize(PATIENCE)
    assert (dst[9] == src[9]).all()
    assert not any(transfer.done() for transfer in normal)
    gate.set()
    normal[-1].synchronize(PATIENCE)
    assert (dst[:4] == src[:4]).all()


def test_a_normal_one_that_has_begun_pauses_for_a_high_one():
    src, dst, program = pair(num_blocks=256, dim=1 << 18)
    plan, some = program.plan(range(1, 256), range(1, 256)), program.plan([0], [0])
    with kvplan.Executor(policy=kvplan.Policy(threads=1)) as executor:

        def pauses():
            dst[:] = 0
            normal = executor.submit(plan)
            until(dst[1:, 0, 0].any)
            executor.submit(some, priority="high").synchronize(PATIENCE)
            paused = not normal.done()
            normal.synchronize(PATIENCE)
            assert (dst == src).all()
            return paused

        until(pauses)  # unless this thread is too slow


def cancelled(transfer):
    """It is done, touched nothing, and says so."""
    assert transfer.done()
    assert repr(transfer).endswith("cancelled)")
    for call in (transfer.synchronize, transfer.result, transfer.wait):
        with pytest.raises(TransferError, match="of 256 bytes was cancelled before it began; nothing was moved"):
            call()
    assert transfer.cancel()


def test_what_named_a_cancelled_one_fails(executor, gate):
    _, dst, program = pair()
    first = executor.submit(program.plan([1], [1]), after=gate)
    second = executor.submit(program.plan([2], [2]), after=first)
    first.cancel()
    with pytest.raises(TransferError, match="failed: transfer of 256 bytes was cancelled"):
        second.synchronize(PATIENCE)
    assert not dst.any()


# The law: the end is that of the order of submits, of each priority by itself; cancelled ones touch no byte.


@dataclass(frozen=True)
class Step:
    way: int
    src: list[int]
    dst: list[int]
    high: bool
    gate: int | None
    take_back: bool


@st.composite
def steps(draw) -> Step:
    count = draw(st.integers(0, 2))
    src, dst = (draw(st.permutations(range(BLOCKS)))[:count] for _ in range(2))
    gate = draw(st.none() | st.integers(0, 2))
    return Step(draw(st.integers(0, 2)), src, dst, draw(st.booleans()), gate, draw(st.integers(0, 3)) == 0)


@examples(250)
@given(todo=st.lists(steps(), max_size=10), order=st.permutations(range(3)), seed=st.integers(0, 9))
def test_the_end_is_that_of_the_order_of_submits(todo, order, seed):
    rng = np.random.default_rng(seed)
    memory = [rng.integers(0, 256, (BLOCKS, 8), np.uint8) for _ in range(6)]
    expected = [one.copy() for one in memory]
    layouts = [KVLayout.from_tensors("block dim", one) for one in memory]
    ways = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)]  # the last three are those of high priority
    programs = [kvplan.compile(layouts[src], layouts[dst]) for src, dst in ways]
    gates = [threading.Event() for _ in range(3)]
    with kvplan.Executor(policy=kvplan.Policy(threads=1)) as executor:
        transfers = [
            executor.submit(
                programs[step.way + 3 * step.high].plan(step.src, step.dst),
                after=None if step.gate is None else gates[step.gate],
                priority="high" if step.high else "normal",
            )
            for step in todo
        ]
        gone = [step.take_back and transfer.cancel() for step, transfer in zip(todo, transfers, strict=True)]
        for number in order:
            gates[number].set()
        for transfer, taken_back in zip(transfers, gone, strict=True):
            if taken_back:
                with pytest.raises(TransferError, match="cancelled"):
                    transfer.synchronize(PATIENCE)
            else:
                transfer.synchronize(PATIENCE)
        stats = executor.stats()
    for step, taken_back in zip(todo, gone, strict=True):
        if not taken_back:
            src, dst = ways[step.way + 3 * step.high]
            expected[dst][step.dst] = expected[src][step.src]
    for got, want in zip(memory, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert (stats.transfers, stats.cancelled, stats.failed) == (len(todo) - sum(gone), sum(gone), 0)
    assert stats.nbytes == sum(8 * len(s.src) for s, taken_back in zip(todo, gone, strict=True) if not taken_back)
