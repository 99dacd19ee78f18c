"""Rows between agents of different machines, packed into few large writes: bytes, notifications, and the choice."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.contract.engines.nixl.pair import BLOCK, PackedPair, heard, move
from tests.nixl import double as nixl
from tests.patience import until


@pytest.fixture
def pair():
    made = PackedPair()
    yield made
    made.close()


@pytest.fixture
def opened():
    """Make pairs that are closed at the end."""
    made = []

    def make(*given, **options):
        made.append(PackedPair(*given, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
@pytest.mark.parametrize("order", ["random", "strided"])
def test_rows_become_few_writes(pair, operation, order):
    here, there = pair.rows() if order == "random" else (np.arange(0, 300, 2), np.arange(150))
    before = [pool.copy() for pool in pair.pools]
    handle = move(pair, operation, here, there, b"request 1")
    to, rows = (0, (here, there)) if operation == "READ" else (1, (there, here))
    np.testing.assert_array_equal(pair.pools[to][rows[0]], before[1 - to][rows[1]])
    np.testing.assert_array_equal(np.delete(pair.pools[to], rows[0], 0), np.delete(before[to], rows[0], 0))
    np.testing.assert_array_equal(pair.pools[1 - to], before[1 - to])
    assert heard(pair.agents[1]) == [b"request 1"]
    writer = pair.real[1 if operation == "READ" else 0]
    assert set(writer.counts) == {1}
    assert len(writer.counts) <= -(-len(here) * BLOCK // 4096) + 1
    figures = pair.agents[0].get_xfer_telemetry(handle)
    assert (figures.totalBytes, figures.descCount) == (len(here) * BLOCK, len(here))
    assert pair.agents[0].query_xfer_backend(handle) == "KVPLAN"
    pair.agents[0].release_xfer_handle(handle)


def test_the_notification_comes_once_and_after_the_bytes(pair):
    here, there = pair.rows()
    pair.pools[1][:] = 0
    seen = []

    def hook(call, agent, what):
        if call == "notify" and agent is pair.real[0]:
            seen.append(bool((pair.pools[1][there] == pair.pools[0][here]).all()))

    pair.machine.hook = hook
    move(pair, "WRITE", here, there, b"note")
    assert seen[-1]
    assert heard(pair.agents[1]) == [b"note"]
    assert pair.notes == {}


def test_auto_packs_many_small_rows_and_leaves_few_to_nixl(opened):
    pair = opened(4000, packed="auto", slots=(8, 1 << 16), apart=True)
    many = move(pair, "READ", *pair.rows(3000))
    few = move(pair, "READ", [1, 5], [7, 3])
    long = move(pair, "READ", np.arange(1000, 3000), np.arange(2000))  # they touch: one piece
    assert [pair.agents[0].query_xfer_backend(one) for one in (many, few, long)] == ["KVPLAN", "UCX", "UCX"]


def test_peers_of_one_machine_are_moved_to_as_before(opened):
    pair = opened(packed="auto")
    move(pair, "READ", *pair.rows())
    assert pair.real[0].made == pair.real[1].made == 0


@pytest.mark.parametrize("kvplan", [(True, False), (False, True)])
def test_a_peer_of_plain_nixl_gets_the_call_untouched(opened, kvplan):
    pair = opened(kvplan=kvplan)
    here, there = pair.rows()
    handle = move(pair, "WRITE", here, there, b"note")
    assert isinstance(handle, nixl.Handle)
    assert pair.real[0].counts == [200]
    np.testing.assert_array_equal(pair.pools[1][there], pair.pools[0][here])
    assert pair.notes == {"decode": [b"note"]}


def test_rows_that_overlap_where_they_are_written_are_nixl_s(pair):
    assert isinstance(pair.make("READ", [1, 1], [2, 3]), nixl.Handle)
    assert isinstance(pair.make("WRITE", [1, 2], [3, 3]), nixl.Handle)
    assert not isinstance(pair.make("WRITE", [1, 1], [2, 3]), nixl.Handle)


def test_notifications_of_other_calls_are_the_engine_s_alone(pair):
    agent = pair.agents[1]
    agent.notifs = {}
    move(pair, "READ", *pair.rows(), b"first:1")
    move(pair, "READ", *pair.rows(), b"second:2")
    pair.agents[0].send_notif(pair.name, b"alone")
    until(lambda: len(agent.update_notifs().get("decode", [])) == 3)
    assert Counter(agent.notifs["decode"]) == Counter([b"first:1", b"second:2", b"alone"])
    assert agent.check_remote_xfer_done("decode", b"second")
    assert not agent.check_remote_xfer_done("decode", b"second")
    assert not agent.check_remote_xfer_done("decode", b":1")
    assert agent.check_remote_xfer_done("decode", b":1", tag_is_prefix=False)
    assert not agent.check_remote_xfer_done("nobody", b"alone")
    assert agent.notifs == {"decode": [b"alone"]}
