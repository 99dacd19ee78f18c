"""How an executor of the host ends: at the program's exit, dropped, closed beside submits, and in a fork."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

import kvplan
from kvplan import TransferError
from tests.execute.host_processes import EXITS, pair, python
from tests.patience import PATIENCE, until


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2", "4"])
@pytest.mark.parametrize("last", ["", "del executor"])
def test_what_was_submitted_before_the_exit_arrives_whole(threads, last):
    code = """
gate = threading.Event()
flying = [executor.submit(program.plan(range(64), range(64)), after=gate)]
flying += [executor.submit(program.plan([k], [k])) for k in range(64)]
atexit.register(gate.set)  # the exit has begun by then
"""
    assert python(EXITS + code + last, threads) == (0, "at exit True\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("last", ["", "del executor"])
def test_an_exit_does_not_wait_for_what_never_comes(last):
    code = """
backend.EXIT_SECONDS = 2.0
executor.submit(program.plan(range(64), range(64)))
executor.submit(program.plan([1], [2]), after=threading.Event())
executor.submit(program.plan([1], [2]))
other = kvplan.Executor()
other.submit(program.plan([1], [2]), after=threading.Event())
"""
    rc, out, err = python(EXITS + code + last, "2", warnings="default")
    assert (rc, out) == (0, "at exit True\n")
    assert "RuntimeWarning: at exit, 3 transfers were given up" in err
    assert err.count("RuntimeWarning: ") == 1
    assert "Traceback" not in err


def test_dropping_an_executor_blocks_nobody_and_loses_nothing():
    src, dst, program = pair()
    gate, before = threading.Event(), set(threading.enumerate())
    executor = kvplan.Executor(policy=kvplan.Policy(threads=2))
    transfer = executor.submit(program.plan([1], [2]), after=gate)
    dropped = threading.Thread(target=lambda last: last.clear(), args=([executor],), daemon=True)
    del executor
    dropped.start()
    dropped.join(PATIENCE)
    assert not dropped.is_alive()
    assert not transfer.done()
    gate.set()
    transfer.synchronize(PATIENCE)
    assert (dst[2] == src[1]).all()
    until(lambda: not set(threading.enumerate()) - before)


def test_an_executor_collected_as_garbage_blocks_nobody():
    _, _, program = pair()
    gate = threading.Event()
    executor = kvplan.Executor()
    transfer = executor.submit(program.plan([1], [2]), after=gate)
    executor.ring = executor
    gone = weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None
    assert not transfer.done()
    gate.set()
    transfer.synchronize(PATIENCE)


@pytest.mark.slow
def test_a_submit_that_races_a_close_is_finished_or_refused():
    _, _, program = pair()
    plan = program.plan([1], [2])
    for _ in range(4):
        executor = kvplan.Executor(policy=kvplan.Policy(threads=1))
        taken, refused = [], []

        def work(executor=executor, taken=taken, refused=refused):
            try:
                while True:
                    taken.append(executor.submit(plan))
            except TransferError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        executor.close()
        for thread in threads:
            thread.join()
        assert all(transfer.done() for transfer in taken)
        assert len(refused) == 3
        assert all("is closed" in text for text in refused)


def test_a_second_close_waits_too():
    src, dst, program = pair()
    gate = threading.Event()
    executor = kvplan.Executor()
    executor.submit(program.plan(range(16), range(16)), after=gate)
    whole = []

    def close():
        executor.close()
        whole.append(bool((dst == src).all()))

    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
    threads[0].join(0.1)
    assert whole == []
    gate.set()
    for thread in threads:
        thread.join()
    assert whole == [True] * 3


def test_an_after_may_close_its_own_executor():
    src, dst, program = pair()
    executor = kvplan.Executor()

    class Closes:
        def wait(self):
            executor.close()

    transfer = executor.submit(program.plan([1], [2]), after=Closes())
    transfer.synchronize(PATIENCE)
    executor.close()
    assert (dst[2] == src[1]).all()


@pytest.mark.slow
def test_an_executor_does_not_survive_a_fork():
    code = """
import os
plan = program.plan(range(64), range(64))
child = os.fork()  # while the loops may still be loading
if child == 0:
    with executor:
        try:
            executor.submit(plan)
        except kvplan.TransferError as error:
            assert "do not survive a fork" in str(error) and "make one in the child" in str(error), error
        else:
            sys.exit(3)
    with kvplan.Executor(policy=kvplan.Policy(threads=2)) as own:
        own.submit(plan).synchronize()
    assert (dst == src).all()
    del executor
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
executor.submit(plan).synchronize()
"""
    # In the parent and in the child; a fork beside threads warns from Python 3.12 on.
    rc, out, err = python(EXITS + code, "2", warnings="ignore")
    assert (rc, out, err) == (0, "at exit True\n" * 2, "")


@pytest.mark.slow
def test_a_parent_s_transfer_in_flight_is_not_waited_for_in_a_fork_s_child():
    code = """
import os, threading
gate = threading.Event()
waiting = executor.submit(program.plan([1], [2]), after=gate)
ended = executor.submit(program.plan([3], [4]), priority="high")
ended.synchronize()
child = os.fork()
if child == 0:
    ended.synchronize()  # it ended before the fork
    try:
        waiting.synchronize()
    except kvplan.TransferError as error:
        assert "do not survive a fork" in str(error), error
        os._exit(0)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
gate.set()
waiting.synchronize()
executor.close()
"""
    rc, _, err = python(EXITS + code, "2", warnings="ignore")
    assert (rc, err) == (0, "")
