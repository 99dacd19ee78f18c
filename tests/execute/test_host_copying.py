"""How the host path copies: with which threads, which end with it, and from which size on past the CPU's caches."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, TransferError
from kvplan.execute.host import memcpy, tasks
from kvplan.execute.host.crew import Crew
from tests.patience import PATIENCE

MIB = 1 << 20


def program_of(shape: tuple[int, ...]) -> kvplan.CopyProgram:
    sides = (KVLayout.from_tensors("block dim", np.zeros(shape, np.uint8)) for _ in range(2))
    return kvplan.compile(*sides)


@pytest.mark.parametrize("priority", ["normal", "high"])
def test_no_thread_outlives_a_close(priority):
    before = set(threading.enumerate())
    with kvplan.Executor(policy=kvplan.Policy(threads=3)) as executor:
        executor.submit(program_of((32, MIB)).plan(range(32), range(32)), priority=priority).synchronize()
        more = set(threading.enumerate()) - before
        assert len(more) >= 3  # those that copy: two beside the one that takes transfers
    assert not set(threading.enumerate()) - before


@pytest.fixture
def streamed(monkeypatch):
    """Whether each call of the copying loops bypassed the caches; all calls, also those that copy nothing."""
    seen = []

    def spying(loop):
        def spy(*given):
            seen.append(bool(given[-1]))
            return loop(*given)

        return spy

    for loop in (memcpy.copy_units, memcpy.copy_flat):
        monkeypatch.setattr(memcpy, loop.py_func.__name__, spying(loop))
    return seen


@pytest.mark.parametrize("block", [MIB, 8 * MIB], ids=["runs as they are", "runs longer than a task"])
@pytest.mark.parametrize(("less", "expected"), [(0, True), (1, False)])
def test_transfers_of_many_bytes_and_no_smaller_ones_bypass_the_caches(streamed, block, less, expected):
    count = tasks.STREAMING_NBYTES // block
    assert count * block == tasks.STREAMING_NBYTES
    plan = program_of((count, block)).plan(range(count), range(count))
    rest = program_of((1, block - 1)).plan([0], [0])
    if less:
        plan = kvplan.join([program_of((count - 1, block)).plan(range(count - 1), range(count - 1)), rest])
    assert plan.nbytes == tasks.STREAMING_NBYTES - less
    with kvplan.Executor(policy=kvplan.Policy(threads=2)) as executor:
        executor.submit(plan).synchronize()
    assert streamed
    assert set(streamed) == {expected}


# ---- a crew ------------------------------------------------------------------------------------------------------


def test_each_task_is_done_once_whatever_the_number_of_threads():
    for helpers in range(4):
        crew, done = Crew(helpers, set()), []
        for count in (0, 1, 2, 5, 3):
            crew.run([partial(done.append, k) for k in range(count)])
            assert sorted(done) == list(range(count))
            done.clear()
        crew.dismiss()


def test_helpers_are_as_many_as_there_is_work_for_and_stay():
    crew, before = Crew(2, set()), set(threading.enumerate())

    def new() -> int:
        return len(set(threading.enumerate()) - before)

    for count, helpers in ((0, 0), (1, 0), (2, 1), (2, 1), (1, 1), (9, 2), (9, 2)):
        crew.run([int] * count)
        assert new() == helpers
    crew.dismiss()
    assert new() == 0


def test_tasks_of_a_crew_run_at_once():
    """Each waits for all the others, so that one thread less would never be done."""
    crew, meeting = Crew(2, set()), threading.Barrier(3)
    crew.run([lambda: meeting.wait(PATIENCE)] * 3)
    crew.run([lambda: meeting.wait(PATIENCE)] * 3)
    crew.dismiss()


def test_the_first_error_is_raised_when_all_tasks_have_ended():
    crew, done = Crew(0, set()), []

    def broken(text: str) -> None:
        done.append(text)
        raise OSError(text)

    with pytest.raises(OSError, match="first"):
        crew.run([lambda: broken("first"), lambda: done.append("second"), lambda: broken("third")])
    assert done == ["first", "second", "third"]


def test_what_interrupts_a_task_ends_its_transfer_and_no_other(monkeypatch):
    program = program_of((4, 64))

    def interrupted(plan):
        def task() -> None:
            raise KeyboardInterrupt

        return [task], 1

    with kvplan.Executor(policy=kvplan.Policy(threads=2)) as executor:
        with monkeypatch.context() as patch:
            patch.setattr(tasks, "tasks_of", interrupted)
            with pytest.raises(TransferError):
                executor.submit(program.plan([1], [2])).result()
        executor.submit(program.plan([1], [2])).synchronize(PATIENCE)
