"""Timed waits end, however late the waiting thread gets its turn."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from kvplan.base.latch import sleep, woken
from tests.patience import PATIENCE


SOON = [k * 1e-6 for k in range(1, 11)]  # seconds


def in_time(call):
    """Return what a call returns; fail if it does not return."""
    told = []
    thread = threading.Thread(target=lambda: told.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert told, "the wait has no end"
    return told[0]


def test_a_wait_ends_although_its_time_is_over_before_it_begins():
    """The first wait on a queue takes two steps in CPython 3.11; a microsecond is over between them."""
    assert in_time(lambda: any(woken(SimpleQueue(), SOON[k % 10]) for k in range(20_000))) is False


def test_so_does_the_first_wait_after_an_entry():
    wake = SimpleQueue()

    def turns():
        for k in range(20_000):
            wake.put(None)
            if not woken(wake, SOON[k % 10]) or woken(wake, SOON[k % 10]):
                return "an entry was lost, or came twice"
        return "ended"

    assert in_time(turns) == "ended"


def test_a_wait_for_a_condition_ends():
    sleepers = []
    assert in_time(lambda: any(sleep(lambda: False, sleepers, SOON[k % 10]) for k in range(20_000))) is False
    assert sleepers == []


def test_an_entry_from_another_thread_ends_a_wait_early():
    wake = SimpleQueue()
    threading.Timer(0.01, wake.put, [None]).start()
    assert in_time(lambda: woken(wake, PATIENCE))
    assert woken(wake, 0.0) is False
    wake.put(None)
    assert woken(wake, 0.0) is True
