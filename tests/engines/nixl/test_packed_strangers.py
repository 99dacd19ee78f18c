"""Packed rows with peers that lie, ask for too much, or say nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvplan
from kvplan.agents.packed.pack_messages import MAGIC
from kvplan.engines.nixl import packed_peers, packed_transfers
from kvplan.engines.nixl.descriptor_rows import Rows
from kvplan.engines.nixl.metadata import joined, split
from kvplan.engines.nixl.packed_transfers import FarMemory
from kvplan.plan.row_plans import RowProgram
from tests.engines.nixl import nixl_double as nixl
from tests.engines.nixl.pair import BLOCK, PackedPair, heard, move
from tests.patience import PATIENCE, until


@pytest.fixture
def pair():
    made = PackedPair()
    yield made
    made.close()


def test_memory_outside_what_is_offered_is_refused(pair):
    move(pair, "READ", *pair.rows())
    secret = np.full((64, BLOCK), 7, np.uint8)
    far = FarMemory().place(Rows.of(np.array([[secret.ctypes.data, BLOCK, 0, BLOCK, 64]]), "DRAM"))
    mine = pair.lists[0].placed
    before = [pool.copy() for pool in (*pair.pools, secret)]
    for reading in (True, False):
        sides = (far, mine) if reading else (mine, far)
        every = [side.rows.addresses(np.arange(64)) for side in sides]
        plan = RowProgram(*(side.layout for side in sides)).plan(*every, BLOCK, 8)
        transfer = pair.way().end_for("prefill").submit("prefill", plan, reading=reading)
        with pytest.raises(kvplan.TransferError, match=r"not in the (writable )?memory that it was offered"):
            transfer.synchronize(PATIENCE)
    for pool, held in zip((*pair.pools, secret), before, strict=True):
        np.testing.assert_array_equal(pool, held)


def test_an_agent_that_gave_no_metadata_offers_nothing():
    pair = PackedPair()
    asker = pair.agents[1]
    card = split(pair.metadata)[1]
    name = asker.add_remote_agent(joined(pair.real[0].get_agent_metadata(), card))
    lists = [
        asker.prep_xfer_dlist(whose, np.array([[pool.ctypes.data, BLOCK, 0, BLOCK, len(pool)]], np.uint64), "DRAM")
        for whose, pool in (("", pair.pools[1]), (name, pair.pools[0]))
    ]
    handle = asker.make_prepped_xfer("READ", lists[0], np.arange(200), lists[1], np.arange(200))
    asker.transfer(handle)
    until(lambda: asker.check_xfer_state(handle) == "DONE")
    assert asker.query_xfer_backend(handle) == "UCX"  # refused before a byte moved, so NIXL has moved it
    np.testing.assert_array_equal(pair.pools[0][:200], pair.pools[1][:200])
    pair.close()


def test_a_peer_that_does_not_answer_is_left_to_nixl(monkeypatch):
    monkeypatch.setattr(packed_transfers, "GREET_SECONDS", 0.05)
    pair = PackedPair(kvplan=(True, False))
    lie = json.dumps({"schema": "kvplan.nixl-agent/1", "identity": "elsewhere", "packed": 1}).encode()
    pair.agents[0].add_remote_agent(joined(pair.real[1].get_agent_metadata(), lie))
    pair.lists[1] = pair.agents[0].prep_xfer_dlist(
        "prefill", np.array([[pair.pools[1].ctypes.data, BLOCK, 0, BLOCK, 300]], np.uint64), "DRAM"
    )
    here, there = pair.rows()
    handle = move(pair, "READ", here, there, b"note")
    np.testing.assert_array_equal(pair.pools[0][here], pair.pools[1][there])
    assert pair.agents[0].query_xfer_backend(handle) == "UCX"
    assert isinstance(pair.make("READ", here, there), nixl.Handle)
    assert pair.real[1].get_new_notifs()["decode"][-1] == b"note"
    monkeypatch.setattr(packed_peers, "PART_SECONDS", 0.05)
    pair.agents[0].remove_remote_agent("prefill")
    pair.close()


def test_an_engine_s_peers_are_removed_by_the_engine_alone(pair):
    shared = pair.agents[0]._kvplan.packed._shared
    shared.remove_remote_agent("prefill")
    assert pair.real[0].check_remote_metadata("prefill")
    pair.real[0].add_remote_agent(b"nixlSerDes|another|0|")
    shared.remove_remote_agent("another")
    assert not pair.real[0].check_remote_metadata("another")


def test_notes_that_lie_harm_nobody(pair):
    here, there = pair.rows()
    move(pair, "READ", here, there)
    mallory = pair.machine.agent("mallory")
    for real in pair.real:
        mallory.add_remote_agent(real.get_agent_metadata())
    rng = np.random.default_rng(5)
    for turn in range(200):
        start = (b"kvplan.wire/1" + b"?!-.x"[turn % 5 : turn % 5 + 1], MAGIC)[turn % 2]
        told = start + rng.integers(0, 256, rng.integers(0, 60), np.uint8).tobytes()
        mallory.send_notif(pair.real[turn % 2].name, told)
    pair.pools[1][:] = 3
    handle = move(pair, "READ", here, there, b"note")
    assert (pair.pools[0][here] == 3).all()
    assert pair.agents[0].query_xfer_backend(handle) == "KVPLAN"
    assert heard(pair.agents[1]) == [b"note"]
