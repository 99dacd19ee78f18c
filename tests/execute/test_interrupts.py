"""What an engine calls stays usable after a KeyboardInterrupt at any point: on the CPU."""

from __future__ import annotations

import gc
import itertools
import threading
import time

import pytest

import kvplan
from kvplan import TransferError
from tests.execute.interrupted_host import (
    PATIENCE,
    Host,
    ask,
    cancel,
    cancel_queued,
    result,
    submit,
    submit_behind,
    submit_first_high,
    submit_high,
    wait,
)
from tests.interrupts import Interrupt

# What is raised in a finalizer, Python swallows.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


@pytest.mark.parametrize(
    "operation", [submit, submit_high, submit_first_high, submit_behind, cancel, cancel_queued, result, wait, ask]
)
def test_an_executor_of_the_cpu_goes_on_after_an_interrupt_at_any_point(operation):
    for at in itertools.count(1):
        host = Host()
        call, interrupt = operation(host), Interrupt(at)
        interrupted = interrupt.within(call)
        try:
            host.check()
        except BaseException as error:
            raise AssertionError(f"interrupted at point {at}, {interrupt.where}") from error
        if not interrupted:
            break
    assert at > 5


@pytest.mark.parametrize(
    "operation", [submit, submit_high, submit_first_high, submit_behind, cancel, cancel_queued, result, ask]
)
def test_a_signal_s_handler_may_submit_and_ask_at_any_point_of_a_call(operation):
    """So may a finalizer, which garbage collection runs; with a lock of threading's, it would wait for itself."""
    for at in itertools.count(1):
        host = Host()
        made = []

        def handler(host=host, made=made):
            held = host.submit(8, after=host.gate)
            made.extend([host.submit(6), host.submit(7, priority="high"), held])
            assert held.cancel()
            made[0].done()
            host.executor.stats()

        call, interrupt = operation(host), Interrupt(at, handler)
        came = interrupt.within(call)
        try:
            host.check()
        except BaseException as error:
            raise AssertionError(f"within point {at}, {interrupt.where}") from error
        if not came:
            break
        for transfer in made[:2]:
            transfer.synchronize(PATIENCE)
        assert (host.dst[6:8] == host.src[6:8]).all()
        assert not host.dst[8].any()
    assert at > 5


def test_a_close_can_be_repeated_after_an_interrupt_at_any_point():
    for at in itertools.count(1):
        host = Host()
        transfers = [host.submit(3, after=host.gate), host.submit(4), host.submit(5, priority="high")]
        opener = threading.Timer(0.002, host.gate.set)
        opener.start()
        interrupt = Interrupt(at)
        interrupted = interrupt.within(host.executor.close)
        host.gate.set()
        host.close()
        opener.join()
        assert all(transfer.done() for transfer in transfers), interrupt.where
        assert (host.dst[3:6] == host.src[3:6]).all()
        with pytest.raises(TransferError, match="is closed"):
            host.submit(6)
        if not interrupted:
            break


def test_an_executor_whose_making_was_interrupted_leaves_no_thread():
    before = set(threading.enumerate())
    for at in itertools.count(1):
        interrupt = Interrupt(at)
        interrupted = interrupt.within(kvplan.Executor)
        end = time.monotonic() + PATIENCE
        while left := [one for one in set(threading.enumerate()) - before if one.is_alive()]:
            assert time.monotonic() < end, (interrupt.where, left)
            time.sleep(1e-3)
            gc.collect()
        if not interrupted:
            break
    assert at > 20


@pytest.mark.parametrize("first", [True, False])
def test_where_no_thread_can_be_started_a_transfer_error_says_so(monkeypatch, first):
    host = Host()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        before = set(threading.enumerate())
        with pytest.raises(TransferError, match="no thread runs the transfers of a CPU executor: can't start new"):
            kvplan.Executor()
        with pytest.raises(TransferError, match="no thread runs the transfers of high priority: can't start new"):
            host.submit(3, priority="high")
        assert host.executor.stats().in_flight == 0
        assert set(threading.enumerate()) <= before
        if first:
            host.submit(4).synchronize(PATIENCE)
    host.check()


@pytest.mark.parametrize("call", ["synchronize", "wait", "result"])
def test_an_interrupted_wait_leaves_the_others_waiting(call):
    """`threading.Event` would keep its lock, and the runner hang in setting it."""
    for at in itertools.count(1):
        host = Host()
        transfer = host.submit(3, after=host.gate)
        seen = []
        other = threading.Thread(target=lambda t=transfer, seen=seen: (t.synchronize(PATIENCE), seen.append(t.done())))
        other.start()
        opener = threading.Timer(0.002, host.gate.set)
        opener.start()
        came = Interrupt(at).within(getattr(transfer, call))
        other.join(PATIENCE)
        opener.join()
        assert seen == [True]
        host.check()
        if not came:
            break
