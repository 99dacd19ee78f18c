"""How an executor of the host ends: dropped, closed beside submits, and in a fork."""

from __future__ import annotations

import threading

import pytest

import kvplan
from kvplan import TransferError
from tests.execute.host_processes import pair
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
