"""Timed waits end, however late the waiting thread gets its turn."""

from __future__ import annotations

import subprocess
import sys
import threading
from queue import SimpleQueue

from kvplan.base import latch
from kvplan.base.latch import sleep, waking, woken
from tests.patience import PATIENCE, until

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


ALONE = """
import signal, sys, time
from kvplan.base.latch import sleep

def handler(*_):
    time.sleep(0.2)  # past the end of the wait

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
sleepers = []
assert sleep(lambda: False, sleepers, 0.1) is False
assert sleepers == []
print("ended")
"""


def test_a_handler_of_the_main_thread_may_take_longer_than_the_wait():
    made = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (made.stdout, made.stderr) == ("ended\n", "")


def test_a_wait_of_the_main_thread_ends_early_and_its_alarm_with_it(monkeypatch):
    wakes, sleepers = [], []
    ring = latch._ring

    def rings(asleep, seconds, wake):
        ring(asleep, seconds, wake)
        wakes.append(seconds)

    monkeypatch.setattr(latch, "_ring", rings)
    done = threading.Event()

    def end():
        until(lambda: sleepers)
        done.set()
        any(waking(sleepers))

    threading.Thread(target=end).start()
    assert sleep(done.is_set, sleepers, 1e12)
    until(lambda: wakes)
    assert sleepers == []


def test_without_a_thread_for_the_alarm_the_wait_ends_all_the_same(monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(latch._thread, "start_new_thread", refused)
    assert sleep(lambda: False, [], 0.01) is False


def test_an_entry_from_another_thread_ends_a_wait_early():
    wake = SimpleQueue()
    threading.Timer(0.01, wake.put, [None]).start()
    assert in_time(lambda: woken(wake, PATIENCE))
    assert woken(wake, 0.0) is False
    wake.put(None)
    assert woken(wake, 0.0) is True
