"""Rows between agents of different machines, packed into few large writes: bytes, notifications, and the choice."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from kvplan import KVPlanError
from kvplan.agents.by_nixl.nixl_packed import PACKED_VERSION
from kvplan.engines.nixl import Agent, own_class
from kvplan.engines.nixl.metadata import joined, split
from kvplan.engines.nixl.packed_options import NEVER, PackedOptions
from tests.engines.nixl import nixl_double as nixl
from tests.engines.nixl.pair import BLOCK, PackedPair, heard, move
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


def test_compiled_loops_are_loaded_while_the_engine_starts(opened, monkeypatch, caplog):
    """The first request would otherwise wait for them, up to seconds."""
    loaded = []

    def load():
        loaded.append(True)
        raise KVPlanError("no compiler")

    monkeypatch.setattr("kvplan.execute.host.memcpy.load", load)
    pair = opened()
    assert len(loaded) == 2  # once for each agent
    pair.agents[0].get_agent_metadata()
    assert len(loaded) == 2
    assert "the first packed transfer will wait: KVPlanError: no compiler" in caplog.text
    move(pair, "READ", *pair.rows())


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
    until(lambda: pair.way(1).lanes.ring is not None)
    assert pair.notes == {}


def test_whole_lists_of_several_sizes(pair):
    agent = pair.agents[0]
    sizes = [8 + 3 * (k % 7) for k in range(100)]
    lists = [
        agent.get_xfer_descs([(p.ctypes.data + 40 * k, size, 0) for k, size in enumerate(sizes)], "DRAM")
        for p in pair.pools
    ]
    expected = pair.pools[0].copy()
    for k, size in enumerate(sizes):
        expected.ravel()[40 * k :][:size] = pair.pools[1].ravel()[40 * k :][:size]
    handle = agent.initialize_xfer("READ", lists[0], lists[1], pair.name, b"note")
    agent.transfer(handle)
    pair.finish(handle)
    np.testing.assert_array_equal(pair.pools[0], expected)
    assert agent.query_xfer_backend(handle) == "KVPLAN"
    assert heard(pair.agents[1]) == [b"note"]


def test_transfers_are_posted_again_and_again(pair):
    here, there = pair.rows(100)
    handles = [pair.make(operation, here, there, b"%s" % operation.encode()) for operation in ("READ", "WRITE")]
    rng = np.random.default_rng(2)
    for turn in range(40):
        source = pair.pools[1 - turn % 2]
        source[:] = rng.integers(0, 256, source.shape, np.uint8)
        pair.agents[0].transfer(handles[turn % 2], b"turn %d" % turn)
        pair.finish(handles[turn % 2])
        np.testing.assert_array_equal(pair.pools[0][here], pair.pools[1][there])
    assert heard(pair.agents[1], 40) == [b"turn %d" % turn for turn in range(40)]
    assert pair.way(0).in_flight == 0
    for handle in handles:
        pair.agents[0].release_xfer_handle(handle)


def test_many_transfers_at_once_and_from_both_sides(pair):
    """Each transfer has rows of its own."""
    back = pair.agents[1]
    name = back.add_remote_agent(pair.agents[0].get_agent_metadata())
    lists = [
        back.prep_xfer_dlist(whose, np.array([[pool.ctypes.data, BLOCK, 0, BLOCK, len(pool)]], dtype=np.uint64), "DRAM")
        for whose, pool in (("", pair.pools[1]), (name, pair.pools[0]))
    ]
    before = [pool.copy() for pool in pair.pools]
    parts = np.arange(300).reshape(10, 30)
    flying = []
    for k, part in enumerate(parts):
        if k % 2:
            handle = pair.make("READ", part, part[::-1], b"%d" % k)
        else:
            handle = back.make_prepped_xfer("READ", lists[0], part, lists[1], part[::-1], b"%d" % k)
        flying.append((pair.agents[0] if k % 2 else back, handle))
        flying[-1][0].transfer(handle)
    for agent, handle in flying:
        until(lambda agent=agent, handle=handle: agent.check_xfer_state(handle) == "DONE")
    for k, part in enumerate(parts):
        to = 1 - k % 2
        np.testing.assert_array_equal(pair.pools[to][part], before[1 - to][part[::-1]])
    assert sorted(heard(pair.agents[1], 5)) == [b"1", b"3", b"5", b"7", b"9"]
    assert sorted(heard(pair.agents[0], 5)) == [b"0", b"2", b"4", b"6", b"8"]


def test_auto_packs_many_small_rows_and_leaves_few_to_nixl(opened):
    pair = opened(4000, packed="auto", slots=(8, 1 << 16), apart=True)
    many = move(pair, "READ", *pair.rows(3000))
    few = move(pair, "READ", [1, 5], [7, 3])
    long = move(pair, "READ", np.arange(1000, 3000), np.arange(2000))  # they touch: one piece
    assert [pair.agents[0].query_xfer_backend(one) for one in (many, few, long)] == ["KVPLAN", "UCX", "UCX"]


def test_peers_of_one_machine_are_moved_to_as_before(opened):
    pair = opened(packed="auto")
    move(pair, "READ", *pair.rows())
    assert pair.way().lanes.ring is None
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


@pytest.mark.parametrize("told", [True, -1, 0, 1.5, "1", None, [1], {}, 1 << 16, 1, PACKED_VERSION + 1])
def test_a_card_with_another_version_is_nixl_s(opened, told):
    pair = opened()
    own, card = split(pair.agents[1].get_agent_metadata())
    pair.agents[0].remove_remote_agent(pair.name)
    card = json.dumps(json.loads(card) | {"packed": told, "identity": "of another machine"}).encode()
    pair.agents[0].add_remote_agent(joined(own, card))
    assert pair.agents[0]._kvplan.packed.peers == {}
    for wrong in (b"", b"{", b"[]", card[:-1], b"\xff" * 40):
        pair.agents[0].add_remote_agent(joined(own, wrong))
        assert pair.agents[0]._kvplan.packed.peers == {}


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


def test_options(monkeypatch):
    real = nixl.Machine().agent("one")
    assert Agent(agent=real)._kvplan.packed is None
    monkeypatch.setenv("KVPLAN_NIXL_PACKED", "always")
    assert Agent(agent=real)._kvplan.packed is None  # it may refuse calls of two threads
    assert Agent(agent=real, packed="never")._kvplan.packed is None
    with pytest.raises(KVPlanError, match="packed is 'perhaps'; expected one of 'auto', 'always', 'never'"):
        Agent(agent=real, packed="perhaps")
    with pytest.raises(KVPlanError, match="slots"):
        Agent(agent=real, packed="auto", slots=(1, 4096))
    monkeypatch.setenv("KVPLAN_NIXL_PACKED", "1")
    with pytest.raises(KVPlanError, match="KVPLAN_NIXL_PACKED is '1'"):
        Agent("two")


def test_an_agent_of_kvplan_s_own_locks_its_calls(monkeypatch):
    modes = SimpleNamespace(NIXL_THREAD_SYNC_NONE="none", NIXL_THREAD_SYNC_STRICT="strict", NIXL_THREAD_SYNC_RW="rw")
    module = SimpleNamespace(nixl_thread_sync_t=modes, nixl_agent_config=lambda: SimpleNamespace(sync_mode=None))
    monkeypatch.setattr(own_class.importlib, "import_module", lambda name: module)
    auto = PackedOptions()
    never = auto._replace(when=NEVER)
    for given, mode in ((None, "strict"), ("none", "strict"), ("rw", "rw")):
        config = SimpleNamespace(sync_mode=given, backends=["UCX"])
        made, options = own_class.locked_config(config, auto, instantiate_all=False)
        assert (made.sync_mode, made.backends, options, config.sync_mode) == (mode, ["UCX"], auto, given)
        assert own_class.locked_config(config, never, instantiate_all=False) == (config, never)
    assert own_class.locked_config(None, auto, instantiate_all=False)[0].sync_mode == "strict"
    assert own_class.locked_config(None, auto, instantiate_all=True) == (None, never)
    del module.nixl_thread_sync_t
    assert own_class.locked_config(None, auto, instantiate_all=False) == (None, never)


@pytest.mark.parametrize(("config", "driven"), [
    (SimpleNamespace(enable_pthread=True), True), (SimpleNamespace(enable_pthread=False), False), (None, False),
])  # fmt: skip
def test_the_thread_for_progress_knows_whether_nixl_has_one(opened, config, driven):
    pair = opened(nixl_conf=config)
    assert [pair.way(which)._progress.naps.patient for which in (0, 1)] == [driven, driven]
