"""What a submit to another process's GPU memory costs, in calls; short notes without a message; ends by any thread."""

from __future__ import annotations

import struct
import sys
import threading

import numpy as np
import pytest

import kvplan
from kvplan import LayoutError
from kvplan.agents import peer_transfer, settling
from kvplan.agents.channel import Channel
from kvplan.agents.cuda_ipc.cuda_ipc_messages import (
    ENDED_WORD,
    NEVER,
    NOTE,
    SHORT_NBYTES,
    SLOTS,
    Message,
    note_messages,
    slot_word,
)
from tests.agents.cuda_ipc.simulated_ipc import Both, cache, devices_that_are_left_alone, joined
from tests.patience import PATIENCE, until
from tests.simulated.executors import executor_on

devices = pytest.fixture(devices_that_are_left_alone)

MOST_CALLS = 200  # of functions by one submit with a note, the simulated driver's among them


def calls_of(call):
    """How many Python and C functions a call calls in this thread."""
    count = [0]

    def seen(frame, event, argument):
        count[0] += event in {"call", "c_call"}

    sys.setprofile(seen)
    try:
        found = call()
    finally:
        sys.setprofile(None)
    return found, count[0]


def test_a_submit_makes_few_calls_sends_no_message_and_wakes_no_thread(devices, monkeypatch):
    device = devices[0]
    with executor_on(device, "kernel") as executor, Both(devices, executor) as both:
        both.peer.submit(both.store.plan([7], [3]), note=b"first").synchronize(PATIENCE)
        device.eager = False
        for _ in range(2):
            plan = both.store.plan([7], [3])
            sent, woken = [], []
            monkeypatch.setattr(Channel, "send", lambda *given, sent=sent: sent.append(given))
            monkeypatch.setattr(settling.Lane, "watch", lambda *given, woken=woken: woken.append(given))
            device.calls.clear()
            transfer, count = calls_of(lambda plan=plan: both.peer.submit(plan, note=b"stored"))
            made = [name for name in device.calls if name != "cuEventQuery"]  # of the threads that look
            monkeypatch.undo()
            device.run()
            transfer.synchronize(PATIENCE)
            assert (sent, woken) == ([], [])
            assert sorted(made) == ["cuEventRecord", "cuEventRecord", "cuLaunchKernelEx", "cuStreamWaitEvent",
                                    "cuStreamWriteValue64"]  # fmt: skip
            assert count <= MOST_CALLS
        device.eager = True
        assert both.notes(3) == [("visitor", b"first")] + 2 * [("visitor", b"stored")]


def test_short_notes_fill_their_slots_and_others_are_messages(devices):
    device = devices[0]
    _, there = cache(devices, 0, 1)
    _, here = cache(devices, 0, 2)
    with executor_on(device, "kernel") as executor, joined(there) as ends:
        program = kvplan.compile(here, ends.layout)
        notes = [b"%d" % k for k in range(SLOTS + 8)]
        notes[3], notes[5], notes[7] = bytes(SHORT_NBYTES), bytes(SHORT_NBYTES + 1), b"x"
        sent = notes * 3  # nobody reads: beyond the slots, notes are messages
        for note in sent:
            ends.after(executor.submit(program.plan([0], [1])), note, urgent=False)
        assert len(ends.told) == len(sent) - (SLOTS - 1)
        device.run()
        assert ends.notes() == sent
        ends.after(executor.submit(program.plan([0], [1])), b"last", urgent=False)
        assert ends.told == []
        device.run()
        assert ends.notes() == [b"last"]


def test_notes_come_in_order_whatever_brings_them(devices):
    device = devices[0]
    _, there = cache(devices, 0, 1)
    _, here = cache(devices, 0, 2)
    rng = np.random.default_rng(3)
    with executor_on(device, "kernel") as executor, joined(there) as ends:
        program, sent, found = kvplan.compile(here, ends.layout), [], []
        for k in range(200):
            note = b"%d " % k + bytes(int(rng.choice([0, 1, 150, 500, 30_000])))
            sent.append(note)
            transfer = executor.submit(program.plan([0], [1]))
            ends.after(transfer, note, urgent=False)
            if rng.random() < 0.1:
                device.run()
            if rng.random() < 0.2:
                found += ends.notes()
        device.run()
        assert found + ends.notes() == sent
        assert ends.notes() == []


def test_a_slot_that_is_not_for_the_next_note_or_not_filled_yet_is_left(devices):
    _, there = cache(devices, 0, 1)
    with joined(there) as ends:
        words, slot = ends.served.words, slot_word(0, 1)
        words.put(slot + 1, struct.pack("=2Q", 1, 4) + b"note")
        words.store(slot, 1 + SLOTS)
        words.store(ENDED_WORD, 5)
        assert ends.served.notes() == []
        words.store(slot, 1)
        words.store(slot + 1, NEVER)  # as of a slot whose number is seen before the rest
        assert ends.served.notes() == []
        words.store(slot + 1, 6)
        assert ends.served.notes() == []
        words.store(ENDED_WORD, 6)
        assert ends.served.notes() == [b"note"]
        assert ends.served.notes() == []
        words.put(slot_word(0, 2) + 1, struct.pack("=2Q", 1, 1 << 60))
        words.store(slot_word(0, 2), 2)
        (note,) = ends.served.notes()
        assert len(note) == SHORT_NBYTES


@pytest.mark.parametrize("number", [2, 3 + SLOTS, 1 << 63])
def test_a_message_behind_notes_that_are_nowhere_is_refused(devices, number):
    _, there = cache(devices, 0, 1)
    with joined(there) as ends:
        with pytest.raises(LayoutError, match="no agent of kvplan sends it"):
            ends.served.heard(Message(NOTE, 0, number, b"x").written())
        ends.served.words.store(slot_word(0, 1), 1)
        (message,) = note_messages(NOTE, 0, 2, b"behind a slot")
        ends.served.heard(message)
        with pytest.raises(LayoutError):
            ends.served.heard(message)


def test_a_transfer_that_nobody_asks_for_ends_by_itself(devices, monkeypatch):
    with executor_on(devices[0], "kernel") as executor, Both(devices, executor) as both:
        for idle in (settling.IDLE_LOOKS, 0):  # the thread looks again soon; it sleeps, and the submit wakes it
            monkeypatch.setattr(settling, "IDLE_LOOKS", idle)
            before = both.visitor.stats().transfers
            until(lambda: both.visitor.stats().in_flight == 0)
            both.peer.submit(both.store.plan([7], [3]))
            until(lambda before=before: both.visitor.stats().transfers == before + 1)


def test_the_caller_that_asks_ends_a_transfer_once(devices, monkeypatch):
    monkeypatch.setattr(settling, "LOOK_SECONDS", PATIENCE)  # the thread does not look
    with executor_on(devices[0], "kernel") as executor, Both(devices, executor) as both:
        both.peer.submit(both.store.plan([7], [3])).synchronize(PATIENCE)
        ended = []
        finish = peer_transfer.PeerTransfer._finish

        def seen(self, *given):
            ended.append(threading.current_thread())
            finish(self, *given)

        monkeypatch.setattr(peer_transfer.PeerTransfer, "_finish", seen)
        transfer = both.peer.submit(both.store.plan([7], [3]), note=b"x")
        until(transfer.done)
        assert ended[0] is threading.main_thread()
        assert transfer.result().nbytes == 2 * 96
        both.peer.submit(both.store.plan([7], [3])).synchronize(PATIENCE)
        assert both.visitor.stats().transfers == 3
        assert both.notes(1) == [("visitor", b"x")]


@pytest.mark.parametrize("step", ["leave_flight", "lost"])
def test_an_end_that_is_interrupted_is_completed_by_the_thread(devices, monkeypatch, step):
    monkeypatch.setattr(settling, "LOOK_SECONDS", PATIENCE)  # the thread does not look, until a caller blocks
    with executor_on(devices[0], "kernel") as executor, Both(devices, executor) as both:
        both.peer.submit(both.store.plan([7], [3])).synchronize(PATIENCE)
        link, main = both.peer.link, threading.main_thread()
        whole = getattr(link, step)

        def interrupted(*given):
            if threading.current_thread() is main:
                raise KeyboardInterrupt
            return whole(*given)

        transfer = both.peer.submit(both.store.plan([7], [3]))
        with monkeypatch.context() as patched:
            patched.setattr(link, step, interrupted)
            with pytest.raises(KeyboardInterrupt):
                until(transfer.done)
        transfer.synchronize(PATIENCE)
        transfer = both.peer.submit(both.store.plan([7], [3]))
        devices[0].run()
        transfer._ends.append((transfer._inners[-1].result(), None))  # and no further
        transfer.synchronize(PATIENCE)
        assert both.visitor.stats().transfers == 3
        assert both.visitor.stats().in_flight == 0


@pytest.mark.parametrize("dead", [True, False])
def test_a_submit_whose_note_finds_the_owner_gone_moves_bytes_and_its_end_says_so(devices, monkeypatch, dead):
    """The note is a message, since nobody has taken the earlier ones. A message that fails otherwise is an error."""
    with executor_on(devices[0], "kernel") as executor, Both(devices, executor) as both:
        for k in range(SLOTS):
            both.peer.submit(both.load.plan([7], [3]), note=b"%d" % k).synchronize(PATIENCE)

        def send(channel, *given):
            if dead:
                channel.lose("'owner' has closed its agent")
            raise kvplan.TransferError("'owner' has closed its agent" if dead else "too many notes")

        with monkeypatch.context() as patched:
            patched.setattr(Channel, "send", send)
            if dead:
                transfer = both.peer.submit(both.load.plan([7], [3]), note=b"last")
                with pytest.raises(
                    kvplan.TransferError, match=r"'owner' failed: .*has closed.*may be wrong: do not use"
                ):
                    transfer.synchronize(PATIENCE)
                with pytest.raises(kvplan.TransferError, match="no transfer with 'owner'"):
                    both.peer.submit(both.load.plan([7], [3]))
            else:
                with pytest.raises(kvplan.TransferError, match="too many notes; the note is not sent, but the bytes"):
                    both.peer.submit(both.load.plan([7], [3]), note=b"last")


def test_a_caller_that_keeps_the_error_of_a_submit_holds_no_later_transfer_up(devices, monkeypatch):
    """The error's traceback keeps the frames of the submit."""
    with executor_on(devices[0], "kernel") as executor, Both(devices, executor) as both:
        for k in range(SLOTS):
            both.peer.submit(both.load.plan([7], [3]), note=b"%d" % k).synchronize(PATIENCE)

        def send(channel, *given):
            raise kvplan.TransferError("too many notes")

        with monkeypatch.context() as patched:
            patched.setattr(Channel, "send", send)
            with pytest.raises(kvplan.TransferError) as kept:
                both.peer.submit(both.load.plan([7], [3]), note=b"last")
        later = both.peer.submit(both.load.plan([6], [2]), deadline=PATIENCE)  # which the lane's thread ends
        until(lambda: both.visitor.stats().in_flight == 0)
        assert later.done()
        assert "too many notes" in str(kept.value)


def test_callers_that_wait_leave_the_thread_no_work(devices, monkeypatch):
    monkeypatch.setattr(settling, "LOOK_SECONDS", PATIENCE)
    monkeypatch.setattr(peer_transfer, "LOOK_SECONDS", PATIENCE)  # a caller on a busy machine looks long enough, too
    settled = []
    settle = peer_transfer.PeerTransfer.settle
    monkeypatch.setattr(peer_transfer.PeerTransfer, "settle", lambda self: (settled.append(self), settle(self))[1])
    with executor_on(devices[0], "kernel") as executor, Both(devices, executor) as both:
        for _ in range(20):
            both.peer.submit(both.store.plan([7], [3]), note=b"stored").synchronize(PATIENCE)
        assert settled == []
        assert both.notes(20) == 20 * [("visitor", b"stored")]
        assert both.visitor.stats().transfers == 20


@pytest.mark.parametrize("timeout", [None, 0, 1e-9, PATIENCE, float("nan")])
def test_a_caller_looks_for_the_end_itself_before_it_wakes_the_thread(devices, monkeypatch, timeout):
    """The thread is woken only after a while, and at once if the caller does not wait."""
    hurried, looks = [], [0]
    with executor_on(devices[0], "kernel") as executor, Both(devices, executor) as both:
        both.peer.submit(both.store.plan([7], [3])).synchronize(PATIENCE)
        end_here, hurry = peer_transfer.PeerTransfer._end_here, settling.Lane.hurry

        def looked(self):
            looks[0] += 1
            return looks[0] > 3 and end_here(self)

        monkeypatch.setattr(settling, "LOOK_SECONDS", PATIENCE)  # the thread does not look, until a caller blocks
        monkeypatch.setattr(peer_transfer.PeerTransfer, "_end_here", looked)
        monkeypatch.setattr(settling.Lane, "hurry", lambda self: (hurried.append(self), hurry(self)))
        transfer = both.peer.submit(both.store.plan([7], [3]))
        monkeypatch.setattr(peer_transfer, "LOOK_SECONDS", PATIENCE)
        if timeout in (0, 1e-9):
            with pytest.raises(kvplan.TransferError, match="has not finished within"):
                transfer.synchronize(timeout)
            assert (looks[0] <= 3, len(hurried)) == (True, 1)
            transfer.synchronize(PATIENCE)
        else:
            transfer.synchronize(timeout)
            assert (looks[0] > 3, hurried) == (True, [])
        assert transfer.result().nbytes == 2 * 96
