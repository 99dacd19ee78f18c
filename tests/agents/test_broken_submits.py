"""Submits to another process's GPU memory that a signal interrupts at any point, or whose handler submits, too."""

from __future__ import annotations

import threading

import pytest

from kvplan.agents.cuda_ipc.cuda_ipc_messages import (
    DROPPED,
    ENDED_WORD,
    NEVER,
    NOTE,
    SHORT_NBYTES,
    SLOT_HEAD,
    SLOTS,
    Message,
    slot_word,
)
from kvplan.errors import LayoutError
from tests.agents.cuda_ipc.simulated_ipc import Both, cache, devices_that_are_left_alone, joined
from tests.interrupts import Interrupt
from tests.patience import PATIENCE, until
from tests.simulated.executors import executor_on
from tests.simulated.objects import Stream

devices = pytest.fixture(devices_that_are_left_alone)

NOTES = {"short": b"x", "message": b"x" * (SHORT_NBYTES + 1), "messages": b"x" * 60_000}


def test_a_visitor_that_fills_slots_as_fast_as_they_are_read_does_not_hold_the_owner(devices, monkeypatch):
    _, there = cache(devices, 0, 1)
    with joined(there) as ends:
        words, count = ends.served.words, [0]
        store = words.store

        def refilled(index, value):
            store(index, value)
            if value == NEVER:
                count[0] += 1
                assert count[0] < 100 * SLOTS, "it reads for ever"
                words.put(index, SLOT_HEAD.pack(0, 4) + b"more")
                store(index - 1, words.load(index - 1) + SLOTS)

        for number in range(1, SLOTS + 1):
            words.put(slot_word(0, number) + 1, SLOT_HEAD.pack(0, 4) + b"note")
            store(slot_word(0, number), number)
        monkeypatch.setattr(words, "store", refilled)
        assert ends.served.notes() == SLOTS * [b"note"]
        assert ends.served.notes() == SLOTS * [b"more"]


def test_a_visitor_that_writes_numbers_ahead_of_a_message_does_not_hold_the_owner(devices, monkeypatch):
    _, there = cache(devices, 0, 1)
    with joined(there) as ends:
        words, asked = ends.served.words, [0]

        def ahead(index):
            asked[0] += 1
            assert asked[0] < 100 * SLOTS, "it reads for ever"
            return asked[0]

        monkeypatch.setattr(words, "load", ahead)
        with pytest.raises(LayoutError, match="no agent of kvplan sends it"):
            ends.served.heard(Message(NOTE, 0, 1 << 63, b"x").written())


def test_a_note_that_is_dropped_before_all_of_it_has_come(devices):
    _, there = cache(devices, 0, 1)
    with joined(there) as ends:
        ends.served.heard(Message(b"m", 0, 1, b"first bytes").written())
        ends.served.heard(Message(DROPPED, 0, 1).written())
        ends.served.heard(Message(NOTE, 0, 2, b"next").written())
        ends.served.words.store(0, 2)
        assert ends.served.notes() == [b"next"]
        ends.served.heard(Message(DROPPED, 0, 2).written())  # it has been delivered
        for number in (4, 1 << 63):
            with pytest.raises(LayoutError, match="no agent of kvplan sends it"):
                ends.served.heard(Message(DROPPED, 0, number).written())
        ends.served.words.store(ENDED_WORD, 1)
        assert ends.served.notes() == []


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
def test_an_interrupted_submit_leaves_notes_in_order_each_once(devices, length, gated):
    device, note = devices[0], NOTES[length]
    with executor_on(device, "kernel") as executor, Both(devices, executor) as both:
        after, theirs = Stream(device.stream()) if gated else None, Stream(devices[1].stream())
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


@pytest.mark.parametrize("length", ["short", "messages"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_handler_that_submits_within_a_submit(devices, length, gated):
    device, note = devices[0], NOTES[length]
    with executor_on(device, "kernel") as executor, Both(devices, executor) as both:
        after, theirs = Stream(device.stream()) if gated else None, Stream(devices[1].stream())
        if gated:
            both.owner.publish(theirs)
        both.peer.submit(both.store.plan([7], [3])).synchronize(PATIENCE)
        for at in range(1, points(both, note, after) + 1):
            if gated:
                both.owner.publish(theirs)
            transfers, plan = [], both.store.plan([7], [3])
            interrupt = Interrupt(at, lambda: submit(b"inner"))

            def submit(text, transfers=transfers, plan=plan):
                transfers.append(both.peer.submit(plan, note=text, after=after))

            thread = threading.Thread(target=interrupt.within, args=(lambda: submit(note),), daemon=True)
            thread.start()
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"it hangs: {interrupt.where}"
            for one in transfers:
                one.synchronize(PATIENCE)
            assert sorted(got for _, got in both.notes(len(transfers))) == sorted([note, b"inner"][: len(transfers)])
            assert len(transfers) == 1 + bool(interrupt.where), interrupt.where
        assert both.notes(0) == []
        assert both.visitor.stats().failed == 0
