"""Transfers between agents: on a double everywhere, on NIXL itself where it is installed."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, KVPlanError, LayoutError, PathError, TransferError
from kvplan.layout.dump import document_of
from kvplan.nixl import NixlAgent
from kvplan.plan.nixl_lists import nixl_lists
from tests.nixl.double import Agent, Network
from tests.patience import PATIENCE, until

OTHER = KVLayout.from_spec(
    {"notation": "layer block dim", "dtype": "uint8", "address": 1 << 20, "device": "cpu",
     "sizes": {"layer": 3, "block": 8, "dim": 64}}
)  # fmt: skip


def heard(agent):
    """The first notes that come, waited for."""
    found = []
    until(lambda: found.extend(agent.notes()) or found)
    return found


def test_bytes_are_read_from_a_peer(both):
    plan = both.load.plan([5, 1, 2], [0, 7, 3])
    transfer = both.peer.submit(plan)
    transfer.synchronize(PATIENCE)
    expected = np.zeros_like(both.mine)
    for src, dst in ((5, 0), (1, 7), (2, 3)):
        expected[:, dst] = both.theirs[src]
    np.testing.assert_array_equal(both.mine, expected)
    made = transfer.result()
    assert (made.nbytes, made.path, made.descriptors, made.launches) == (3 * 192, "nixl", 9, 1)
    assert transfer.done()
    assert repr(transfer).endswith("done)")
    assert (both.me.stats().transfers, both.me.stats().nbytes, both.me.stats().failed) == (1, 576, 0)


def test_bytes_are_written_to_a_peer_with_a_note(both):
    both.mine[:] = 7
    before = both.theirs.copy()
    both.peer.submit(both.store.plan([0, 1], [6, 2]), note=b"request 17").synchronize(PATIENCE)
    before[[6, 2]] = 7
    np.testing.assert_array_equal(both.theirs, before)
    assert heard(both.you) == [(both.me.name, b"request 17")]
    assert both.you.notes() == []


def test_reads_and_writes_are_counted_apart(doubled):
    doubled.peer.submit(doubled.load.plan([1], [1])).synchronize(PATIENCE)
    doubled.peer.submit(doubled.store.plan([1, 2], [1, 2])).synchronize(PATIENCE)
    flows = doubled.me.stats().flows
    assert {way: flow.nbytes for (_, way), flow in flows.items()} == {"read": 192, "write": 384}


def test_a_plan_of_nothing_ends_at_once_and_still_tells(both):
    transfer = both.peer.submit(both.load.plan([], []), note=b"empty")
    assert transfer.done()
    assert not both.me._end.kept
    assert transfer.result().nbytes == 0
    assert heard(both.you) == [(both.me.name, b"empty")]


def test_many_at_once(both):
    transfers = [both.peer.submit(both.load.plan([k], [k])) for k in range(8)]
    for transfer in reversed(transfers):
        transfer.wait()
        transfer.wait_layer(2)
    np.testing.assert_array_equal(both.mine, both.theirs.transpose(1, 0, 2))
    assert both.me.stats().transfers == 8


def test_a_peer_that_comes_back_is_met_by_its_new_card(both):
    both.peer.submit(both.load.plan([1], [1])).synchronize(PATIENCE)
    old = both.peer
    again = both.me.meet(both.you.card())
    with pytest.raises(TransferError, match="was forgotten; meet it again"):
        old.submit(both.load.plan([1], [1]))
    again.submit(both.load.plan([2], [2])).synchronize(PATIENCE)
    np.testing.assert_array_equal(both.mine[:, 2], both.theirs[2])


def test_one_that_was_forgotten_is_not_forgotten_again(both):
    """NIXL knows peers by name: the one that came after it would be forgotten."""
    old = both.peer
    again = both.me.meet(both.you.card())
    both.me.forget(old)
    again.submit(both.load.plan([2], [2])).synchronize(PATIENCE)
    np.testing.assert_array_equal(both.mine[:, 2], both.theirs[2])
    for wrong in ("you", both.you.meet(both.me.card())):
        with pytest.raises(KVPlanError, match=r"give what meet\(\) of 'me-"):
            both.me.forget(wrong)


def test_closing_ends_what_has_not(doubled):
    doubled.network.frozen = True
    transfer = doubled.peer.submit(doubled.load.plan([1], [1]))
    doubled.me.close()
    doubled.me.close()
    with pytest.raises(TransferError, match="was forgotten"):
        transfer.synchronize(PATIENCE)
    for call in (doubled.me.card, doubled.me.notes, lambda: doubled.me.meet(b""), lambda: doubled.peer.submit(None)):
        with pytest.raises(TransferError, match="is closed"):
            call()


def test_plans_that_are_not_between_the_two(doubled):
    here = doubled.me.layouts["kv"]
    stranger = KVLayout.from_tensors("layer block dim", np.zeros((3, 8, 64), np.uint8))
    dump = KVLayout.from_spec(document_of(stranger.built))
    theirs = doubled.peer.layouts["pool"]
    for src, dst, message in (
        (here, stranger, "dst of Plan.* is neither"),
        (stranger, theirs, "src of Plan.* is neither"),
        (dump, here, "src of Plan.* is neither"),
        (here, OTHER, "dst of Plan.* is neither"),
        (here, here, "both sides of .* are memory of this process"),
        (theirs, theirs, "both sides of .* are memory of 'you"),
    ):
        with pytest.raises(PathError, match=message):
            doubled.peer.submit(kvplan.compile(src, dst).plan([0], [1]))
    assert not doubled.mine.any()


def test_a_slice_of_what_was_registered_is_registered(doubled):
    program = kvplan.compile(
        doubled.peer.layouts["pool"].slice(layers=range(1, 2)), doubled.me.layouts["kv"].slice(layers=range(1, 2))
    )
    doubled.peer.submit(program.plan([4], [0])).synchronize(PATIENCE)
    assert doubled.mine.any(axis=(1, 2)).tolist() == [False, True, False]


def test_a_destination_that_is_read_only(doubled):
    frozen = np.zeros((3, 8, 64), np.uint8)
    frozen.flags.writeable = False
    agent = doubled.agent("third", kv=KVLayout.from_tensors("layer block dim", frozen))
    peer = agent.meet(doubled.you.card())
    with pytest.raises(LayoutError, match="read-only"):
        peer.submit(kvplan.compile(peer.layouts["pool"], agent.layouts["kv"]).plan([0], [0]))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"attempts": 0}, "attempts is 0"),
        ({"attempts": True}, "attempts is True"),
        ({"deadline": 0}, "deadline is 0"),
        ({"deadline": float("nan")}, "deadline is nan"),
        ({"deadline": "2"}, "deadline is '2'"),
        ({"deadline": True}, "deadline is True"),
        ({"note": "text"}, "note is a str"),
    ],
)
def test_what_submit_does_not_take(doubled, told, message):
    with pytest.raises(KVPlanError, match=message):
        doubled.peer.submit(doubled.load.plan([0], [0]), **told)


def test_what_is_no_plan(doubled):
    with pytest.raises(KVPlanError, match="plan is a list"):
        doubled.peer.submit([1])


def changed(card: bytes, **fields: object) -> bytes:
    return json.dumps(json.loads(card) | fields).encode()


def test_cards_that_are_none(doubled):
    card = doubled.you.card()
    for bad in (b"", b"\xff", b"[]", b"3", b"{}", changed(card, metadata=3), changed(card, metadata="!"),
                changed(card, metadata="\u00e9"), changed(card, layouts=[1]), changed(card, layouts={"kv": 3}),
                changed(card, name=None), changed(card, schema="kvplan.nixl/2")):  # fmt: skip
        with pytest.raises(LayoutError, match="card"):
            doubled.me.meet(bad)
    made_up = {"pool": {"notation": "block dim", "sizes": {"block": 4, "dim": 8}}}
    with pytest.raises(LayoutError, match="as if it were a spec"):
        doubled.me.meet(changed(card, layouts=made_up))
    with pytest.raises(TransferError, match="does not take the metadata"):
        doubled.me.meet(changed(card, metadata="AAAA"))
    with pytest.raises(TransferError, match="in the card of 'another' is of the agent 'you-"):
        doubled.me.meet(changed(card, name="another"))
    with pytest.raises(KVPlanError, match="is this process"):
        doubled.me.meet(doubled.me.card())


def test_a_card_opens_no_file_here(doubled, tmp_path):
    file = tmp_path / "layout.json"
    doubled.you.layouts["pool"].save(file)
    with pytest.raises(LayoutError, match=r"layout 'pool' of the card is '.*layout\.json'; give what KVLayout\.save"):
        doubled.me.meet(changed(doubled.you.card(), layouts={"pool": str(file)}))


def test_agents_that_cannot_be(doubled, monkeypatch):
    network = Network(failures=["register"])
    layout = doubled.me.layouts["kv"]
    with pytest.raises(TransferError, match="cannot register the memory of 'x'"):
        NixlAgent("x", {"kv": layout}, agent=Agent(network, "x"))
    with pytest.raises(LayoutError, match="is a ndarray"):
        NixlAgent("x", {"kv": doubled.mine}, agent=Agent(network, "x"))
    with pytest.raises(LayoutError, match="not of this process's memory"):
        NixlAgent("x", {"kv": doubled.peer.layouts["pool"]}, agent=Agent(network, "x"))
    with pytest.raises(KVPlanError, match="agent is called 'y' by NIXL and 'x' here"):
        NixlAgent("x", {"kv": layout}, agent=Agent(network, "y"))
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(PathError, match=r"pip install nixl"):
        NixlAgent("x", {"kv": layout})
    nothing = SimpleNamespace(backends={}, get_plugin_list=lambda: ["POSIX"])
    stub = SimpleNamespace(nixl_agent=lambda *_: nothing, nixl_agent_config=lambda **_: None)
    monkeypatch.setitem(sys.modules, "nixl", stub)
    with pytest.raises(PathError, match=r"none of the backends \['UCX'\]; it has \['POSIX'\]"):
        NixlAgent("x", {"kv": layout})

    def broken(*_):
        raise RuntimeError("No plugins available")

    stub.nixl_agent = broken
    with pytest.raises(PathError, match=r"NIXL cannot make an agent here: RuntimeError: No plugins available"):
        NixlAgent("x", {"kv": layout})
    doubled.me.nixl.get_agent_metadata = broken
    with pytest.raises(TransferError, match=r"no metadata of .*: RuntimeError: No plugins available"):
        doubled.me.card()


def test_regions_are_registered_once(doubled):
    whole = doubled.me.layouts["kv"]
    agent = doubled.agent("once", kv=whole, part=whole.slice(layers=range(1, 2)), again=whole)
    assert agent.nixl.memory == {"DRAM": [(doubled.mine.ctypes.data, doubled.mine.nbytes, 0)]}


def test_lists_of_both_sides_at_once(doubled):
    plan = doubled.load.plan([3, 1], [0, 5])
    src, dst = nixl_lists(plan.descriptors(), plan.layouts)
    assert src.rows.tolist() == plan.nixl("src").rows.tolist()
    assert dst.rows.tolist() == plan.nixl("dst").rows.tolist()
