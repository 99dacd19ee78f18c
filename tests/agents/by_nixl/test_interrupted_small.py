"""Small direct transfers by NIXL whose callers are interrupted: nothing is lost, and no handle of NIXL is left."""

from __future__ import annotations

import threading

import pytest

from kvplan import TransferError
from kvplan.agents.settling import Lane
from tests.agents.by_nixl.known_agents import heard, looks, same, settled
from tests.interrupts import Interrupt
from tests.nixl import double
from tests.patience import PATIENCE, until


@looks(0, 2)
@pytest.mark.parametrize("jumps", [False, True])
def test_a_wait_that_is_interrupted_anywhere_loses_nothing_and_fails_nothing(pair, jumps, monkeypatch):
    """The lane's thread alone releases NIXL's handles: NIXL releases one twice if an interrupt comes within."""
    monkeypatch.setattr("kvplan.agents.peer_transfer.LOOK_SECONDS", PATIENCE)
    at, came = 0, True
    while came:
        at += 1
        transfer = pair.peer.submit(pair.load.plan([at % 8], [at % 5]), note=b"%d" % at, way="direct")
        interrupt = Interrupt(at, jumps=jumps)
        came = interrupt.within(lambda: transfer.synchronize(PATIENCE))  # noqa: B023
        until(transfer.done)
        settled(pair)
        assert heard(pair.you) == [("me", b"%d" % at)], interrupt.where
    assert at > 1 or jumps
    assert (pair.me.stats().transfers, pair.me.stats().failed) == (at, 0)


@looks(2)
def test_a_submit_that_is_interrupted_anywhere_leaves_nothing(pair):
    """Also while the caller keeps the error, and with it the frame of the submit. The next transfer cleans up."""
    at, kept = 1, []

    def submit():
        try:
            pair.peer.submit(pair.load.plan([1], [1]), way="direct")
        except KeyboardInterrupt as error:
            kept.append(error)

    while True:
        interrupt = Interrupt(at)
        interrupt.within(submit)
        if not interrupt.where:
            break
        until(lambda: not pair.me.stats().in_flight)
        pair.peer.submit(pair.load.plan([2], [2]), way="direct").synchronize(PATIENCE)
        if (
            interrupt.where.startswith(("return", "c_return of RLock.__exit__"))
            and pair.peer.nixl.own.stats().in_flight
        ):
            pair.me.forget(pair.peer)  # posted, and lost on the way from NIXL to the lane
            pair.meet()
        settled(pair)
        at += 1
    assert kept
    settled(pair)


class HandlerError(Exception):
    """What a signal handler raises."""


@looks(2)
def test_what_a_signal_handler_raises_within_a_look_comes_to_the_caller(pair, monkeypatch):
    pair.network.frozen = True
    transfer = pair.peer.submit(pair.load.plan([1], [1]), way="direct")
    check, main = double.Agent.check_xfer_state, threading.main_thread()

    def handler():
        raise HandlerError

    def interrupted(self, handle):
        if threading.current_thread() is main:
            handler()
        return check(self, handle)

    with monkeypatch.context() as patch:
        patch.setattr(double.Agent, "check_xfer_state", interrupted)
        for ask in (transfer.done, lambda: transfer.synchronize(PATIENCE)):
            with pytest.raises(HandlerError):
                ask()
    pair.network.frozen = False
    transfer.synchronize(PATIENCE)
    assert same(pair, 1, 1)


@looks(3)
def test_an_error_of_nixl_within_a_callers_look_is_the_transfers(pair):
    transfer = pair.peer.submit(pair.load.plan([1], [1]), way="direct")
    pair.network.failures = ["look"]
    with pytest.raises(TransferError, match="reading from 'you' failed"):
        transfer.synchronize(PATIENCE)
    settled(pair)


@looks(2)
def test_a_transfer_that_waits_is_not_refused_by_an_interrupt_behind_its_submit(pair, monkeypatch):
    """The lane has it already, and submits it when what it waits for has come."""
    event = threading.Event()

    def watch(self, transfer):
        self.waker(None)
        until(lambda: transfer._waking is not None)
        raise KeyboardInterrupt

    monkeypatch.setattr(Lane, "watch", watch)
    with pytest.raises(KeyboardInterrupt):
        pair.peer.submit(pair.load.plan([4], [4]), after=event, way="direct")
    assert pair.me.stats().in_flight == 1
    event.set()
    settled(pair)
    assert same(pair, 4, 4)
    assert pair.me.stats().transfers == 1
