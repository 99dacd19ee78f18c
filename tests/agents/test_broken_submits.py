"""Submits to another process's GPU memory that a signal interrupts at any point, or whose handler submits, too."""

from __future__ import annotations

import pytest

from tests.agents.cuda_ipc.simulated_ipc import Both, OnGpu, two_gpus
from tests.interrupts import Interrupt
from tests.patience import PATIENCE, until

driver = pytest.fixture(two_gpus)

NOTES = {"short": b"x", "long": b"x" * 60_000}


def points(both, note, after):
    """How many points a submit has where a signal's handler may run."""
    interrupt = Interrupt(0)
    transfers, plan = [], both.store.plan([7], [3])
    interrupt.within(lambda: transfers.append(both.peer.submit(plan, note=note, after=after)))
    transfers[0].synchronize(PATIENCE)
    both.notes(1)
    return interrupt.points


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("length", NOTES)
def test_an_interrupted_submit_leaves_notes_in_order_each_once(driver, length, gated):
    note = NOTES[length]
    with Both(driver) as both:
        after, theirs = OnGpu(driver.stream(), 0) if gated else None, OnGpu(driver.stream(1), 1)
        if gated:
            both.owner.publish(theirs)
        both.peer.submit(both.store.plan([7], [3])).synchronize(PATIENCE)
        for at in range(1, points(both, note, after) + 1):
            interrupt, plan = Interrupt(at), both.store.plan([7], [3])
            if gated:  # so that the submit waits for the owner's stream, and for the caller's
                both.owner.publish(theirs)
            interrupt.within(lambda plan=plan: both.peer.submit(plan, note=note, after=after))
            last = both.peer.submit(both.store.plan([7], [3]), note=b"last %d" % at)
            last.synchronize(PATIENCE)
            until(lambda: both.visitor.stats().in_flight == 0)
            found = []
            while (b"last %d" % at) not in found:
                found += [got for _, got in both.notes(1)]
            assert found in ([note, b"last %d" % at], [b"last %d" % at], [b"last %d" % at, note]), interrupt.where
            found = [got for _, got in both.owner.notes()]
            assert found in ([], [note]), interrupt.where
