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
from tests.execute.host_processes import EXITS, pair, python
from tests.patience import PATIENCE, takes_no_more, until
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


def test_high_ones_keep_their_order(executor, gate):
    src, dst, program = pair()
    held = executor.submit(program.plan([1], [1]), after=gate, priority="high")
    behind = executor.submit(program.plan([2], [2]), priority="high")
    normal = executor.submit(program.plan([3], [3]))
    normal.synchronize(PATIENCE)  # nothing of the high ones is copied, so that it need not wait
    assert not held.done()
    assert not behind.done()
    gate.set()
    behind.synchronize(PATIENCE)
    assert (dst[1:4] == src[1:4]).all()


@pytest.mark.parametrize("first", ["normal", "high"])
def test_one_that_names_one_of_the_other_priority_follows_it(executor, gate, first):
    src, dst, program = pair()
    second = {"normal": "high", "high": "normal"}[first]
    one = executor.submit(program.plan([1], [5]), after=gate, priority=first)
    other = executor.submit(program.plan([2], [5]), after=one, priority=second)
    with pytest.raises(TransferError, match="has not finished"):
        other.synchronize(0.02)
    gate.set()
    for transfer in (one, other):
        transfer.synchronize(PATIENCE)
    assert (dst[5] == src[2]).all()


def cancelled(transfer):
    """It is done, touched nothing, and says so."""
    assert transfer.done()
    assert repr(transfer).endswith("cancelled)")
    for call in (transfer.synchronize, transfer.result, transfer.wait):
        with pytest.raises(TransferError, match="of 256 bytes was cancelled before it began; nothing was moved"):
            call()
    assert transfer.cancel()


@pytest.mark.parametrize("priority", ["normal", "high"])
def test_one_that_waits_for_what_never_comes_is_taken_back_and_those_behind_go_on(executor, gate, priority):
    src, dst, program = pair()
    waiting = executor.submit(program.plan([1], [1]), after=gate, priority=priority)
    behind = executor.submit(program.plan([2], [2]), priority=priority)
    again = executor.submit(program.plan([3], [3]), after=gate, priority=priority)
    last = executor.submit(program.plan([4], [4]), priority=priority)
    assert waiting.cancel()
    cancelled(waiting)
    behind.synchronize(PATIENCE)
    assert again.cancel()
    last.synchronize(PATIENCE)
    gate.set()
    executor.submit(program.plan([5], [5]), priority=priority).synchronize(PATIENCE)
    executor.close()
    assert (dst[[2, 4, 5]] == src[[2, 4, 5]]).all()
    assert not dst[[1, 3]].any()
    assert (executor.stats().transfers, executor.stats().cancelled, executor.stats().failed) == (3, 2, 0)


def test_one_in_the_queue_is_taken_back(executor, gate):
    src, dst, program = pair()
    first = executor.submit(program.plan([1], [1]), after=gate)
    second = executor.submit(program.plan([2], [2]))
    third = executor.submit(program.plan([3], [3]))
    assert second.cancel()
    cancelled(second)
    assert not first.done()
    gate.set()
    third.synchronize(PATIENCE)
    assert (dst[[1, 3]] == src[[1, 3]]).all()
    assert not dst[2].any()


def test_what_named_a_cancelled_one_fails(executor, gate):
    _, dst, program = pair()
    first = executor.submit(program.plan([1], [1]), after=gate)
    second = executor.submit(program.plan([2], [2]), after=first)
    first.cancel()
    with pytest.raises(TransferError, match="failed: transfer of 256 bytes was cancelled"):
        second.synchronize(PATIENCE)
    assert not dst.any()


def test_an_after_may_close_an_executor_that_has_high_ones(gate):
    src, dst, program = pair()
    executor = kvplan.Executor()

    class Closes:
        def wait(self):
            gate.wait(PATIENCE)
            executor.close()

    high = executor.submit(program.plan([2], [2]), priority="high")
    transfer = executor.submit(program.plan([1], [1]), after=Closes())
    behind = executor.submit(program.plan([3], [3]), priority="high")
    gate.set()
    for one in (high, transfer, behind):
        one.synchronize(PATIENCE)
    executor.close()
    assert (dst[1:4] == src[1:4]).all()


def test_a_close_waits_for_high_ones_too(gate):
    src, dst, program = pair()
    executor = kvplan.Executor()
    executor.submit(program.plan([1], [1]), after=gate, priority="high")
    waiting = executor.submit(program.plan([2], [2]), after=gate)
    closing = threading.Thread(target=executor.close)
    closing.start()
    until(lambda: takes_no_more(executor))
    waiting.cancel()  # the close waits for a runner that is relieved
    with pytest.raises(TransferError, match="is closed"):
        executor.submit(program.plan([1], [1]), priority="high")
    gate.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert (dst[1] == src[1]).all()
    assert not dst[2].any()


def test_a_close_beside_a_cancel_waits_for_those_behind():
    src, dst, program = pair()
    executor = kvplan.Executor()
    waiting = executor.submit(program.plan([1], [1]), after=threading.Event())
    behind = executor.submit(program.plan([2], [2]))
    seen = []

    def close():
        executor.close()
        seen.append(behind.done())

    closing = threading.Thread(target=close)
    closing.start()
    closing.join(0.05)  # as far as it comes
    assert waiting.cancel()
    closing.join(PATIENCE)
    assert seen == [True]
    assert (dst[2] == src[2]).all()


@pytest.mark.slow
def test_an_exit_does_not_wait_for_what_was_taken_back():
    code = """
first = executor.submit(program.plan(range(64), range(64)), priority="high")
held = executor.submit(program.plan([1], [2]), after=threading.Event())
assert held.cancel()
"""
    assert python(EXITS + code, "2") == (0, "at exit True\n", "")


@pytest.mark.slow
def test_an_exit_gives_up_high_ones_that_wait():
    code = """
backend.EXIT_SECONDS = 2.0
executor.submit(program.plan(range(64), range(64)))
held = executor.submit(program.plan([1], [2]), after=threading.Event(), priority="high")
executor.submit(program.plan([1], [2]), after=held)
"""
    rc, out, err = python(EXITS + code, "2", warnings="default")
    assert (rc, out) == (0, "at exit True\n")
    assert "RuntimeWarning: at exit, 2 transfers were given up" in err


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
