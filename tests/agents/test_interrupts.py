"""A signal handler that raises an error at any moment: nothing hangs, and what was submitted still ends."""

from __future__ import annotations

import random
import signal
from contextlib import contextmanager

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from tests.agents.workers import BLOCKS, DIM, LAYERS
from tests.patience import PATIENCE, until


class InterruptError(Exception):
    """What the handler raises."""


@contextmanager
def interrupting(seconds):
    """Raise an error in the main thread after some time, once.

    A signal that comes just before Python blocks in a wait is seen at the next signal only, so others follow.
    """
    raised = []

    def handler(*_):
        if not raised:
            raised.append(None)
            raise InterruptError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)
        yield
    finally:
        raised.append(None)  # from here on the handler raises nothing
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def mine():
    return KVLayout.from_tensors("layer block dim", np.zeros((LAYERS, BLOCKS, DIM), np.uint8))


@pytest.mark.slow
def test_submits_that_are_interrupted_at_random_moments(agents, mine):
    rng = random.Random(20)
    owner, visitor = agents("owner"), agents("visitor", layouts={})
    peer = visitor.meet(owner.card())
    plan = kvplan.compile(peer.layouts["kv"], mine).plan([1], [1])
    peer.submit(plan).synchronize(PATIENCE)
    sent, heard = 0, []
    for _ in range(300):
        try:
            with interrupting(rng.random() * 1e-3 + 1e-6):
                for _ in range(20):
                    sent += 1
                    peer.submit(plan, note=b"%d" % sent).synchronize(PATIENCE)
                    heard += [note for _, note in owner.notes()]
        except InterruptError:
            pass
    peer.submit(plan).synchronize(PATIENCE)
    until(lambda: visitor.stats().in_flight == 0)
    heard += [note for _, note in owner.notes()]
    assert heard  # a note may be lost with the call that was interrupted; none comes twice
    assert len(heard) == len(set(heard))
    visitor.close(timeout=PATIENCE)
    owner.close(timeout=PATIENCE)
