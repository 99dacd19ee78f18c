"""Every thread that waits for a transfer goes on when it ends, whatever the others wait for."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

import kvplan

PATIENCE = 60.0  # seconds after which a test fails rather than hangs


@pytest.fixture
def hasty():
    """Threads that take turns all the time, so that one runs in the midst of what another one does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_threads_with_and_without_a_limit_wait_for_one_transfer(hasty, end):
    layout = kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 4, 16), np.int8))
    plan = kvplan.compile(layout, layout).plan([0], [1])
    with kvplan.Executor() as executor:
        for _ in range(100):
            gate, begun = threading.Event(), threading.Barrier(9)
            transfer = executor.submit(plan, after=gate)

            def wait(timeout, transfer=transfer, begun=begun):
                begun.wait()
                try:
                    transfer.synchronize(timeout)
                except kvplan.TransferError:
                    assert end == "cancel"

            limits = [4 * PATIENCE, None] * 4
            threads = [threading.Thread(target=wait, args=(limit,), daemon=True) for limit in limits]
            for thread in threads:
                thread.start()
            begun.wait()
            gate.set() if end == "finish" else transfer.cancel()
            for thread in threads:
                thread.join(PATIENCE)
            assert not any(thread.is_alive() for thread in threads)
            gate.set()
