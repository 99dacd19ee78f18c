"""The transport ``nixl`` of agents, on a double of NIXL: cards, both directions, notes, ``after=`` and ends."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, LayoutError, PathError, TransferError
from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.peer import Peer
from tests.agents.by_nixl.known_agents import Far, heard
from tests.nixl import double
from tests.patience import PATIENCE


@pytest.fixture
def far():
    made = Far()
    yield made
    made.close()


def test_memory_of_two_processes_may_have_the_same_addresses(tmp_path):
    """As where two workers of one model reserve the same ranges of virtual memory on their GPUs."""
    here = KVLayout.from_tensors("layer block dim", np.zeros((3, 8, 64), np.uint8))
    here.save(tmp_path / "there.json")
    there = KVLayout.load(tmp_path / "there.json")
    assert (there, there.addresses) == (here, "dump")
    peer = Peer("you", None, None, None, {"kv": ("nixl", there)})
    for src, dst, reading in ((there, here, True), (here, there, False)):
        assert peer._direction(kvplan.compile(src, dst).plan([0, 1], [5, 2])) == (reading, "nixl")
    for both, side in ((here, "neither side"), (there, "both sides")):
        with pytest.raises(PathError, match=side):
            peer._direction(kvplan.compile(both, both).plan([0], [1]))


def test_private_memory_goes_by_nixl(far):
    peer = far.meet()
    assert peer.transport == "nixl"
    assert peer.layouts["kv"].addresses == "dump"
    result = peer.submit(far.load.plan([5, 1], [0, 7]), note=b"read").result()
    assert (result.path, result.nbytes) == ("nixl", 2 * 192)
    np.testing.assert_array_equal(far.mine[:, 0], far.theirs[5])
    far.mine[:] = 7
    peer.submit(far.store.plan([2], [3]), note=b"wrote").synchronize(PATIENCE)
    assert (far.theirs[3] == 7).all()
    assert heard(far.you) == [("me", b"read"), ("me", b"wrote")]
    peer.send(b"alone")
    assert heard(far.you) == [("me", b"alone")]
    assert (far.me.stats().transfers, far.me.stats().in_flight) == (2, 0)


def test_after_is_waited_for_without_the_users_thread(far):
    peer = far.meet()
    event, never = threading.Event(), threading.Event()
    transfer = peer.submit(far.load.plan([5], [0]), after=event)
    assert not transfer.done()
    assert transfer.inner is None
    event.set()
    transfer.synchronize(PATIENCE)
    np.testing.assert_array_equal(far.mine[:, 0], far.theirs[5])
    waiting = peer.submit(far.load.plan([5], [1]), after=never)
    assert waiting.cancel()
    with pytest.raises(TransferError, match="cancelled before it began"):
        waiting.synchronize(PATIENCE)
    late = peer.submit(far.load.plan([5], [1]), after=never, deadline=0.01)
    with pytest.raises(TransferError, match="it had not begun, and nothing was moved"):
        late.synchronize(PATIENCE)
    assert not far.mine[:, 1].any()


def test_failures_are_tried_again_and_then_told(far):
    peer = far.meet()
    far.network.failures = ["post"]
    peer.submit(far.load.plan([5], [0]), attempts=2).synchronize(PATIENCE)
    far.network.failures = ["post"]
    with pytest.raises(TransferError, match="reading from 'you' failed"):
        peer.submit(far.load.plan([5], [0])).synchronize(PATIENCE)
    far.network.agents["you"].dead = True
    with pytest.raises(TransferError, match="reading from 'you' failed"):
        peer.submit(far.load.plan([5], [0])).synchronize(PATIENCE)


def test_a_forgotten_peer(far):
    peer = far.meet()
    far.me.forget(peer)
    with pytest.raises(TransferError, match="no transfer with 'you'"):
        peer.submit(far.load.plan([5], [0]))
    with pytest.raises(TransferError, match="no note to 'you'"):
        peer.send(b"x")
    again = far.meet()
    again.submit(far.load.plan([5], [0])).synchronize(PATIENCE)


def test_cards_that_lie_about_nixl(far):
    card = json.loads(far.you.card())
    for part in (None, {}, {"metadata": 3}, {"metadata": "xyz"}, {"metadata": "00", "more": 1}):
        card["offered"]["nixl"]["part"] = part
        with pytest.raises(LayoutError, match="the card's nixl is"):
            far.me.meet(json.dumps(card).encode())
    card["offered"]["nixl"]["part"] = {"metadata": "00"}
    with pytest.raises(TransferError, match="NIXL does not take the metadata"):
        far.me.meet(json.dumps(card).encode())


def test_an_agent_of_nixl_that_refuses(far):
    far.network.failures = ["register"]
    you = far.agent("refused", {"kv": KVLayout.from_tensors("block dim", np.zeros((4, 8), np.uint8))}, ("nixl",))
    with pytest.raises(PathError, match="nixl: 'refused' does not offer it: NIXL cannot register the memory"):
        far.me.meet(you.card())
    you.close()


def test_an_agent_of_nixl_is_closed_by_another_thread_while_it_is_asked_for(far):
    class Closed(NixlEnd):
        @property
        def refused(self):
            self._made = None

        @refused.setter
        def refused(self, why):
            pass

    end = Closed("third", {}, double.Agent(far.network, "third"), ("UCX",), progress_thread=False)
    end._made = made = object()
    assert end.agent() is made
