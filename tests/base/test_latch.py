"""Timed waits end, however late the waiting thread gets its turn."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from kvplan.agents.by_nixl import nixl_progress
from kvplan.agents.by_nixl.nixl_progress import NixlProgress
from kvplan.base import latch
from kvplan.base.latch import sleep, waking, woken
from kvplan.base.threads import Worker, aside
from tests.interrupts import Interrupt
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


@pytest.mark.parametrize("limit", [1e10, float("inf")])
def test_a_limit_of_centuries_is_one(limit):
    wake, latched = SimpleQueue(), latch.Latch()
    threading.Timer(0.01, lambda: (wake.put(None), latched.set())).start()
    assert in_time(lambda: woken(wake, limit))
    assert latched.wait(limit)
    worker = Worker("short", bool, "it cannot start", set())
    worker.start()
    assert worker.join(limit)


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


ALONE_SECONDS = 240  # `make test` ends a test after 300 s, and the process would live on


def alone(code):
    """Run code in a process of its own, which says that it has ended."""
    made = subprocess.run(
        [sys.executable, "-c", SIGNALS + code], capture_output=True, text=True, timeout=ALONE_SECONDS, check=False
    )
    assert (made.stdout, made.stderr) == ("ended\n", "")


SIGNALS = """
import signal, sys, threading, time
from queue import SimpleQueue
from kvplan.base.latch import sleep, woken
from kvplan.base.threads import Worker

signal.signal(signal.SIGUSR1, lambda *_: None)
sys.setswitchinterval(1.0)  # a thread that was interrupted gets its turn too late

def disturbed(start, join, wait):
    # Signals a thread in its wait of 0.3 s, lets no thread run until that time is over, and returns whether all that
    # was in time. A thread that has not ended is there for the signal: without the interpreter it cannot end.
    waits, ended, begin = [], [], time.monotonic()

    def work():
        waits.append(threading.get_ident())
        wait(0.3)
        ended.append(None)

    thread = start(work)
    while not waits:
        time.sleep(1e-3)
    time.sleep(0.05)  # waits has an entry: the thread is about to block
    in_time = not ended and time.monotonic() < begin + 0.25
    if in_time:
        signal.pthread_kill(waits[0], signal.SIGUSR1)
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            pass
        in_time = not ended
    join(thread)
    assert ended
    return in_time
"""


def test_a_handler_of_the_main_thread_may_take_longer_than_the_wait():
    alone("""
def handler(*_):
    time.sleep(0.2)  # past the end of the wait

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
sleepers = []
assert sleep(lambda: False, sleepers, 0.1) is False
assert sleepers == []
print("ended")
""")


def test_a_signal_may_come_to_a_thread_of_the_user():
    alone("""
def start(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread

while not disturbed(start, threading.Thread.join, lambda limit: sleep(lambda: False, [], limit)):
    pass  # the machine was too slow
print("ended")
""")


def test_a_signal_may_come_to_a_thread_of_kvplan():
    alone("""
def start(work):
    worker = Worker("naps", work, "it cannot start", set(), naps=True)
    worker.start()
    return worker

while not disturbed(start, Worker.join, lambda limit: woken(SimpleQueue(), limit)):
    pass  # the machine was too slow
print("ended")
""")


def test_threads_with_naps_take_no_signals_but_faults(monkeypatch):
    asked = []
    monkeypatch.setattr(nixl_progress, "exact_naps", lambda: asked.append(None))
    found = []

    def look():
        found.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return False

    progress = NixlProgress(look, lambda: False, set())
    progress.start()
    until(lambda: found)
    progress.stop()
    assert progress.thread.join(PATIENCE)
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPROF} <= found[0]
    assert not {signal.SIGSEGV, signal.SIGBUS} & found[0]
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


END = """
import gc, os
from kvplan.base.latch import Latch

class Last:
    def __init__(self):
        self.wait, self.write, self.me = Latch().wait, os.write, self

    def __del__(self):
        self.write(1, b"woken\\n" if self.wait(0.05) else b"ended\\n")

gc.disable()
last = Last()  # in a cycle: it goes when the modules have gone
"""


def test_a_wait_ends_while_the_interpreter_ends():
    alone(END)


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


class ToldError(RuntimeError):
    """What a user's handler may raise; `kvplan.TransferError` is a RuntimeError, too."""


def tell():
    raise ToldError


@pytest.mark.parametrize(
    ("do", "error"), [(None, KeyboardInterrupt), (tell, ToldError)], ids=["KeyboardInterrupt", "user"]
)
def test_a_wait_that_is_interrupted_at_any_point_leaves_no_alarm(do, error):
    """The error comes out, and neither the caller's queue nor the thread of its alarm is left."""
    sleepers, before, at, raised = [], threads(), 1, True
    while raised:
        one, raised = Interrupt(at, do), False
        try:
            one.within(partial(sleep, lambda: False, sleepers, 0.3))
        except error:
            raised = True
        raised |= do is None and bool(one.where)  # it takes KeyboardInterrupt itself
        assert raised == bool(one.where), f"lost at {one.where}"
        assert sleepers == [], one.where
        at += 1
    assert at > 10
    until(lambda: threads() <= before)


def test_a_call_aside_that_is_interrupted_runs_at_most_once():
    before, every, at, one = threads(), [[]], 1, Interrupt(1, tell)
    while one.points >= one.at or not every[-1]:
        made = []  # of this call alone: threads of earlier tests may end meanwhile, so that one of ours is not awaited
        every.append(made)
        one = Interrupt(at, tell)
        with suppress(ToldError):
            one.within(partial(aside, partial(made.append, None)))
        until(lambda: threads() <= before)
        assert len(made) <= 1, one.where
        at += 1
    assert at > 3
    assert max(map(len, every)) == 1


def test_really_no_more_threads():
    alone("""
import resource
from kvplan.base.latch import thread_started
from kvplan.base.threads import aside

pages = int(open("/proc/self/statm").read().split()[0])
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 20), hard))
assert not thread_started(print, ())
assert sleep(lambda: False, [], 0.05) is False
assert aside(lambda: 7) == 7
print("ended")
""")


def test_a_wait_ends_early_and_its_alarm_with_it(monkeypatch):
    rings, sleepers = [], []
    ring = latch._ring
    monkeypatch.setattr(latch, "_ring", lambda *given: (ring(*given), rings.append(given[1])))
    done = threading.Event()

    def end():
        until(lambda: sleepers)
        done.set()
        any(waking(sleepers))

    threading.Thread(target=end).start()
    assert sleep(done.is_set, sleepers, 1e12)
    until(lambda: rings)
    assert sleepers == []


def test_an_alarm_that_comes_too_early_is_no_end(monkeypatch):
    """The clock of the system may be set anew while a thread waits by it."""
    now = [0.0]
    monkeypatch.setattr(latch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    wake, tries = SimpleQueue(), []

    class Early:
        def acquire(self, timeout):
            tries.append(timeout)
            now[0] += timeout / 2 if len(tries) < 4 else timeout
            return False

    latch._ring(Early(), 16.0, wake)
    assert tries == [16.0, 8.0, 4.0, 2.0]
    assert wake.qsize() == 1


def test_a_wait_without_a_number_ends_at_once():
    assert in_time(lambda: sleep(lambda: False, [], float("nan"))) is False


def test_without_a_thread_for_the_alarm_the_wait_ends_all_the_same(monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    stand_in = SimpleNamespace(allocate_lock=threading.Lock, start_new_thread=refused)
    monkeypatch.setattr(latch, "_thread", stand_in)
    assert sleep(lambda: False, [], 0.01) is False


def test_an_entry_from_another_thread_ends_a_wait_early():
    wake = SimpleQueue()
    threading.Timer(0.01, wake.put, [None]).start()
    assert in_time(lambda: woken(wake, PATIENCE))
    assert woken(wake, 0.0) is False
    wake.put(None)
    assert woken(wake, 0.0) is True
