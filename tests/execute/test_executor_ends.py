"""How an executor of the host ends: dropped, closed beside submits, and in a fork."""

from __future__ import annotations

import threading

import pytest

import kvplan
from kvplan import TransferError
from tests.execute.host_processes import EXITS, pair, python
from tests.patience import PATIENCE, until


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
