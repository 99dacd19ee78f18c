"""NIXL as a wire, on a double of NIXL: writes that are posted again, notes, and a peer that is gone."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import KVLayout, TransferError
from kvplan.nixl import NixlAgent
from kvplan.nixl.nixl_wire import NixlWire
from tests.nixl import double

SLOT = 4096


class Ends:
    """Two agents, each with a ring of four slots."""

    def __init__(self) -> None:
        self.network = double.Network()
        self.lost: list[str] = []
        self.rings = [np.zeros(4 * SLOT, np.uint8) for _ in range(2)]
        pool = KVLayout.from_tensors("block dim", np.zeros((2, 8), np.uint8))
        self.me, self.you = (
            NixlAgent(name, {"kv": pool}, agent=double.Agent(self.network, name)) for name in ("me", "you")
        )
        self.mine, self.yours = (
            agent.ring(ring.ctypes.data, ring.nbytes, "cpu")
            for agent, ring in zip((self.me, self.you), self.rings, strict=True)
        )
        self.me.add("you", self.yours.metadata())
        self.you.add("me", self.mine.metadata())
        self.wire = NixlWire(self.me.end, "you", "cpu", self.lost.append)
        self.wire.ring(self.yours.address, self.yours.nbytes, "cpu")
        self.wire.greet()

    def write(self, here: int, there: int, nbytes: int, note: bytes = b"note"):
        return self.wire.write(self.mine.address + here * SLOT, self.yours.address + there * SLOT, nbytes, note)

    def ended(self, write) -> str:
        while self.wire.state(write) == "moving":
            pass
        return self.wire.state(write)

    def close(self):
        self.wire.close()
        self.mine.close()
        self.yours.close()
        for agent in (self.me, self.you):
            agent.close()
        self.network.check_released()


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.close()


def test_a_write_brings_its_bytes_and_its_note(ends):
    ends.rings[0][:] = np.arange(4 * SLOT) % 251
    assert ends.ended(ends.write(1, 3, 100, b"chunk 7")) == "done"
    np.testing.assert_array_equal(ends.rings[1][3 * SLOT : 3 * SLOT + 100], ends.rings[0][SLOT : SLOT + 100])
    assert not ends.rings[1][: 3 * SLOT].any()
    assert ends.you.notes() == [("me", b"chunk 7")]


def test_an_equal_write_is_posted_again_without_being_prepared_again(ends):
    live = ends.network.agents["me"].live
    assert ends.ended(ends.write(0, 0, SLOT)) == "done"
    prepared = len(live)
    for k in range(5):
        ends.rings[0][:] = k
        assert ends.ended(ends.write(0, 0, SLOT, b"%d" % k)) == "done"
        assert (ends.rings[1][:SLOT] == k).all()
    assert len(live) == prepared == 3
    assert [note for _, note in ends.you.notes()] == [b"note", b"0", b"1", b"2", b"3", b"4"]


def test_equal_writes_that_move_at_once_are_prepared_apart(ends):
    ends.network.frozen = True
    both = [ends.write(0, 0, SLOT), ends.write(0, 0, SLOT)]
    assert [ends.wire.state(one) for one in both] == ["moving", "moving"]
    ends.network.frozen = False
    assert [ends.ended(one) for one in both] == ["done", "done"]


def test_a_write_that_is_given_up(ends):
    ends.network.frozen = True
    write = ends.write(0, 0, SLOT)
    ends.network.failures = ["release"]
    assert not ends.wire.release(write)
    assert ends.wire.state(write) == "moving"
    assert ends.wire.release(write)
    assert ends.wire.state(write).startswith("failed: ")
    assert ends.wire.release(write)
    ends.network.frozen = False
    assert not ends.rings[1].any()


@pytest.mark.parametrize("failure", ["post", "look"])
def test_a_write_that_fails(ends, failure):
    ends.network.failures = [failure]
    write = ends.write(0, 0, SLOT)
    assert ends.ended(write).startswith("failed: RemoteDisconnectError")
    assert ends.lost
    assert ends.wire.release(write)


def test_a_write_that_cannot_be_prepared(ends):
    with pytest.raises(TransferError, match="NIXL cannot write to 'you'"):
        ends.write(0, 4, SLOT)
    ends.network.failures = ["make"]
    with pytest.raises(TransferError, match="NIXL cannot write to 'you'"):
        ends.write(0, 0, SLOT)


def test_a_ring_that_nobody_registered(ends):
    with pytest.raises(TransferError, match="NIXL cannot reach the ring of 'you'"):
        ends.wire.ring(ends.yours.address, 8 * SLOT, "cpu")


def test_notes_wait_until_the_peer_has_told_where_its_ring_is(ends):
    early = NixlWire(ends.me.end, "you", "cpu", ends.lost.append)
    early.send(b"first")
    early.tell(b"greeting")
    early.send(b"second")
    assert ends.you.notes() == [("me", b"greeting")]
    early.greet()
    early.send(b"third")
    assert ends.you.notes() == [("me", b"first"), ("me", b"second"), ("me", b"third")]


def test_a_peer_that_is_gone_is_told(ends):
    ends.network.agents["you"].dead = True
    with pytest.raises(TransferError, match="NIXL does not send the note to 'you'"):
        ends.wire.send(b"anyone?")
    assert "NIXL_ERR_REMOTE_DISCONNECT" in ends.lost[0]


def test_a_peer_that_was_restarted_is_replaced(ends):
    again = double.Agent(ends.network, "you", life=1)
    registered = again.register_memory(np.array([(ends.yours.address, 4 * SLOT, 0)], np.int64), "DRAM")
    with pytest.raises(TransferError, match="NIXL does not take the metadata of 'you'"):
        ends.me.add("you", again.get_agent_metadata())
    ends.me.replace("you", again.get_agent_metadata())
    ends.me.tell("you", b"welcome back")
    assert again.get_new_notifs() == {"me": [b"welcome back"]}
    again.deregister_memory(registered)


def test_few_writes_wait_to_be_posted_again(ends, monkeypatch):
    monkeypatch.setattr("kvplan.nixl.nixl_wire.KEPT_WRITES", 4)
    for nbytes in range(1, 20):
        assert ends.ended(ends.write(0, 0, nbytes)) == "done"
    assert len(ends.network.agents["me"].live) == 3 * 4


def test_a_held_peer_is_known_until_it_is_let_go(ends):
    ends.me.hold("you", lambda: True)
    assert "you" in ends.network.agents["me"].known
    ends.me.let_go("you")
    assert "you" not in ends.network.agents["me"].known
    ends.me.let_go("you")  # nothing is left to do


def test_a_held_connection_is_renewed_only_if_that_is_allowed(ends):
    ends.me.meet(ends.you.card())
    joins = ends.network.joins
    ends.me.hold("you", lambda: False)
    ends.me.renew("you")
    assert ends.network.joins == joins
    ends.me.hold("you", lambda: True)
    ends.me.renew("you")
    assert ends.network.joins == joins + 1
    ends.me.renew("nobody")
