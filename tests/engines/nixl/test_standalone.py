"""The agent without NIXL: its lists, its refusals, and its peers in one process."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch

import kvplan
from kvplan.engines.nixl import Agent
from kvplan.engines.nixl.metadata import joined, split
from kvplan.engines.nixl.neighbours import Neighbourhood
from kvplan.engines.nixl.standalone import DescriptorList, StandaloneAgent
from tests.engines.nixl import nixl_double as nixl
from tests.patience import PATIENCE, until


def alone(name):
    return Agent(agent=StandaloneAgent(name))


def test_lists_of_tensors_arrays_and_tuples_are_read():
    agent, tensor = alone("a"), torch.zeros(4, 8)
    row = (tensor.data_ptr(), 128, 0)
    every = ((tensor, None), ([tensor], None), ([row], "DRAM"), ([(*row, "")], "cpu"), (np.array([row]), "DRAM"))
    for given, kind in every:
        made = agent.get_xfer_descs(given, kind)
        assert (made, made.getType()) == ([row], "DRAM")
        assert agent.get_reg_descs(made) is made
        assert agent.deserialize_descs(agent.get_serialized_descs(made)) == made
    assert DescriptorList("cuda", [row]).getType() == "VRAM"
    assert agent.get_plugin_list() == []
    agent.make_connection("b")
    for given, kind, words in (
        ([row], None, "needs mem_type"), ([row], "FILE", "expected one of"), (tensor.T, None, "not contiguous"),
    ):  # fmt: skip
        with pytest.raises(kvplan.KVPlanError, match=words):
            agent.get_xfer_descs(given, kind)


def test_what_kvplan_cannot_move_is_refused_with_the_remedy():
    agent, pool = alone("a"), np.zeros(64, np.uint8)
    listed = agent.prep_xfer_dlist("", [(pool.ctypes.data, 64, 0)], "DRAM")
    with pytest.raises(kvplan.KVPlanError, match="no agent 'b'"):
        agent.prep_xfer_dlist("b", [(pool.ctypes.data, 64, 0)], "DRAM")
    with pytest.raises(kvplan.PathError, match=r"pip install nixl"):
        agent.make_prepped_xfer("READ", listed, [0], listed, [0])
    both = agent.get_xfer_descs([(pool.ctypes.data, 64, 0)], "DRAM")
    with pytest.raises(kvplan.PathError):
        agent.initialize_xfer("READ", both, both, "b")
    with pytest.raises(kvplan.PathError, match="no peer 'b'"):
        agent.send_notif("b", b"note")
    with pytest.raises(kvplan.LayoutError, match="of an agent with NIXL"):
        agent.add_remote_agent(b"nixlSerDes|")
    agent.release_dlist_handle(listed)


def test_notifications_of_one_process_come_once_and_a_deleted_peer_gets_none():
    here, there, pool = alone("here"), alone("there"), np.zeros(64, np.uint8)
    there.register_memory([(pool.ctypes.data, 64, 0, "")], "DRAM")
    name = here.add_remote_agent(there.get_agent_metadata())
    for note in ("text", b"bytes"):
        here.send_notif(name, note)
    assert there.get_new_notifs() == {"here": [b"text", b"bytes"]}
    assert there.get_new_notifs() == {}
    del there
    with pytest.raises(kvplan.TransferError, match="has been deleted"):
        here.send_notif(name, b"late")


def test_private_memory_is_offered_to_no_other_process(caplog):
    caplog.set_level("INFO", "kvplan.engines.nixl")
    agent, pool = alone("private"), np.zeros(1 << 16, np.uint8)
    agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
    own, card = split(agent.get_agent_metadata())
    assert "agent" not in json.loads(card)
    assert "1 of 1 ranges of cpu are not offered to peers: " in caplog.text
    assert "share_memory_()" in caplog.text
    elsewhere = json.loads(card) | {"identity": "of another process"}
    with pytest.raises(kvplan.LayoutError, match="offers nothing"):
        Neighbourhood("other").meet("private", elsewhere)
    other = alone("other")
    assert other.add_remote_agent(joined(own, json.dumps(elsewhere).encode())) == "private"
    assert "transfers with private go by NIXL" in caplog.text


def test_a_name_that_a_card_cannot_hold_leaves_all_to_nixl(caplog):
    agent, pool = alone("a\nb"), torch.zeros(64, dtype=torch.uint8).share_memory_()
    agent.register_memory([(pool.data_ptr(), 64, 0, "")], "DRAM")
    assert split(agent.get_agent_metadata())[1] is None
    assert "NIXL moves all transfers" in caplog.text


def test_memory_of_files_is_not_kvplan_s():
    machine = nixl.Machine()
    agent = Agent(agent=machine.agent("a"))
    listed = nixl.Descriptors("FILE", [(0, 8, 3, "path")])
    agent.register_memory(listed)
    agent.deregister_memory(listed)
    assert agent.get_agent_metadata().startswith(b"nixlSerDes|a|0|")


class Slow:
    """A transfer that ends when it is told."""

    over = False

    def done(self):
        return self.over

    def cancel(self):
        return False

    def synchronize(self, timeout=None):
        if not self.over:
            raise kvplan.TransferError(f"not within {timeout} seconds")


def test_a_transfer_in_flight_is_neither_posted_again_nor_released(monkeypatch):
    machine, pool = nixl.Machine(), np.zeros(64, np.uint8)
    here, there = (Agent(agent=machine.agent(name)) for name in ("here", "there"))
    for agent in (here, there):
        agent.register_memory([(pool.ctypes.data, 64, 0, "")], "DRAM")
    name = here.add_remote_agent(there.get_agent_metadata())
    lists = [here.prep_xfer_dlist(who, [(pool.ctypes.data + at, 8, 0)], "DRAM") for who, at in (("", 0), (name, 8))]
    slow, neighbour = Slow(), here._kvplan.neighbours["there"]
    monkeypatch.setattr(neighbour, "submit", lambda plan: slow)
    handle = here.make_prepped_xfer("READ", lists[0], [0], lists[1], [0])
    assert here.transfer(handle) == "PROC"
    asked = []

    def asks():  # as a signal's handler within a question
        slow.__dict__.pop("done")
        asked.append(here.check_xfer_state(handle))
        with pytest.raises(nixl.nixlRepostActiveError):
            here.transfer(handle)
        return False

    slow.done = asks
    asking = threading.Thread(target=here.check_xfer_state, args=(handle,), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    assert asked == ["PROC"], "it hangs"
    assert here.check_xfer_state(handle) == here.check_xfer_state(handle) == "PROC"
    with pytest.raises(nixl.nixlRepostActiveError):
        here.transfer(handle)
    with pytest.raises(nixl.nixlBackendError):
        here.release_xfer_handle(handle)
    slow.over = True
    until(lambda: here.check_xfer_state(handle) == "DONE")
    here._kvplan.telemetry = False
    with pytest.raises(nixl.nixlNoTelemetryError):
        here.get_xfer_telemetry(handle)
    here.release_xfer_handle(handle)
