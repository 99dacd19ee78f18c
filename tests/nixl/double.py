"""NIXL in one process: agents that know each other by name, and do at a look what a NIC would do at its leisure.

Refuses what NIXL 1.5.1 refuses (seen on the real one): unknown peers, lists of no rows, memory that nobody
registered, lists of unlike lengths, indices past the end, a peer met a second time with other metadata.
"""

from __future__ import annotations

import ctypes
import json
import threading
from dataclasses import dataclass, field

import numpy as np


class NotFoundError(Exception):
    """NIXL_ERR_NOT_FOUND."""


class NotAllowedError(Exception):
    """NIXL_ERR_NOT_ALLOWED."""


class MismatchError(Exception):
    """NIXL_ERR_MISMATCH."""


class RemoteDisconnectError(Exception):
    """NIXL_ERR_REMOTE_DISCONNECT."""


@dataclass
class Network:
    """All agents, and what is to go wrong: each failure is used up by the call it meets."""

    agents: dict[str, Agent] = field(default_factory=dict)
    looks: int = 2  # at a transfer, before it is done
    failures: list[str] = field(default_factory=list)  # "make", "post", "look", "err", "half", "release"
    frozen: bool = False  # nothing moves
    joins: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def check_released(self) -> None:
        """Check that no agent has a handle, or registered memory, any more."""
        assert not any(one.live for one in self.agents.values()), "a handle was left"
        assert not any(rows for one in self.agents.values() for rows in one.memory.values())

    def fails(self, call: str) -> bool:
        if self.failures and self.failures[0] == call:
            self.failures.pop(0)
            return True
        return False


@dataclass
class Handle:
    agent: Agent
    rows: list[tuple[int, int]] = field(default_factory=list)
    owner: str = ""
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    note: bytes = b""
    left: int = 0
    connection: int = 0
    released: bool = False
    state: str = "NEW"

    def release(self):
        if self.released:
            return
        if self.agent.network.fails("release"):
            raise NotAllowedError("NIXL_ERR_REPOST_ACTIVE")
        self.released = True
        self.agent.live.remove(self)


class Agent:
    def __init__(self, network: Network, name: str, life: int = 0):
        self.network, self.name, self.life = network, name, life
        self.memory: dict[str, list[tuple[int, int, int]]] = {}
        self.known: dict[str, int] = {}  # by peer, its life
        self.connections: dict[str, int] = {}
        self.inbox: dict[str, list[bytes]] = {}
        self.live: list[Handle] = []
        self.dead = False
        self.backends = {"UCX": 1}
        network.agents[name] = self

    # What kvplan calls.

    def register_memory(self, rows, memory):
        assert rows.ndim == 2
        assert rows.shape[1] == 3
        if self.network.fails("register"):
            raise NotFoundError("NIXL_ERR_BACKEND")
        self.memory.setdefault(memory, []).extend(map(tuple, rows.tolist()))
        return memory, rows

    def deregister_memory(self, registered):
        memory, rows = registered
        for row in rows.tolist():
            self.memory[memory].remove(tuple(row))

    def get_agent_metadata(self):
        return json.dumps([self.name, self.life]).encode()

    def get_partial_agent_metadata(self, registered, inc_conn_info, backends):
        assert inc_conn_info
        assert backends == ["UCX"]
        assert registered
        return self.get_agent_metadata()

    def add_remote_agent(self, metadata):
        try:
            name, life = json.loads(metadata)
        except ValueError as error:
            raise MismatchError("NIXL_ERR_MISMATCH") from error
        if self.known.get(name, life) != life:
            raise NotAllowedError("NIXL_ERR_NOT_ALLOWED")
        if name not in self.known:  # more metadata of a known agent leaves its connection as it is
            self.network.joins += 1
            self.connections[name] = self.network.joins
        self.known[name] = life
        return name.encode()

    def remove_remote_agent(self, name):
        if name not in self.known:
            raise NotFoundError("NIXL_ERR_NOT_FOUND")
        del self.known[name], self.connections[name]

    def prep_xfer_dlist(self, agent_name, rows, mem_type=None):
        rows[0]  # NIXL's own IndexError of an empty list
        assert rows.dtype == np.int64
        assert rows.flags.c_contiguous
        local = agent_name == "NIXL_INIT_AGENT"
        if not local and agent_name not in self.known:
            raise NotFoundError("NIXL_ERR_NOT_FOUND")
        whose = self if local else self.network.agents[agent_name]
        spread = []
        for address, nbytes, device, *more in rows.tolist():
            stride, count = more or (nbytes, 1)
            for k in range(count):
                start = address + k * stride
                if not any(
                    a <= start and start + nbytes <= a + n and device == d for a, n, d in whose.memory[mem_type]
                ):
                    raise NotFoundError("NIXL_ERR_NOT_FOUND")
                spread.append((start, nbytes))
        handle = Handle(self, rows=spread, owner="" if local else agent_name)
        self.live.append(handle)
        return handle

    def make_prepped_xfer(self, operation, local, local_indices, remote, remote_indices, note=b""):
        if self.network.fails("make"):
            raise RemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        assert not local.owner
        assert remote.owner
        handle = Handle(self, owner=remote.owner, note=note, connection=self.connections[remote.owner])
        if len(local_indices) != len(remote_indices):
            raise MismatchError("NIXL_ERR_INVALID_PARAM")
        for a, b in zip(local_indices.tolist(), remote_indices.tolist(), strict=True):
            (mine, nbytes), (theirs, same) = local.rows[a], remote.rows[b]
            if nbytes != same:
                raise MismatchError("NIXL_ERR_INVALID_PARAM")
            handle.moves.append((mine, theirs, nbytes) if operation == "READ" else (theirs, mine, nbytes))
        self.live.append(handle)
        return handle

    def get_xfer_descs(self, rows, mem_type=None):
        return rows, mem_type

    def initialize_xfer(self, operation, local, remote, remote_agent, note=b""):
        sides = self.prep_xfer_dlist("NIXL_INIT_AGENT", *local), self.prep_xfer_dlist(remote_agent, *remote)
        try:
            every = np.arange(len(local[0]))
            return self.make_prepped_xfer(operation, sides[0], every, sides[1], every, note)
        finally:
            for side in sides:
                self.live.remove(side)

    def transfer(self, handle, note=b""):
        assert not handle.released
        assert handle.state != "PROC", "NIXL_ERR_REPOST_ACTIVE"
        if self.network.fails("post"):
            raise RemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        self._check_connected(handle)
        handle.note = note or handle.note
        handle.left, handle.state = self.network.looks, "PROC"
        return self._advance(handle)

    def check_xfer_state(self, handle):
        assert handle.state != "NEW"
        if self.network.fails("look"):
            raise RemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        if self.network.fails("err"):
            return "ERR"
        if self.network.fails("half"):
            for move in handle.moves[: len(handle.moves) // 2]:
                ctypes.memmove(*move)
            raise RemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        self._check_connected(handle)
        return self._advance(handle)

    def send_notif(self, name, note):
        if name not in self.known:
            raise NotFoundError("NIXL_ERR_NOT_FOUND")
        if self.network.fails("notify") or self.network.agents[name].dead:
            raise RemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        self._deliver(name, note)

    def get_new_notifs(self):
        with self.network.lock:
            found, self.inbox = self.inbox, {}
        return found

    def get_plugin_list(self):
        return ["UCX"]

    # How it works.

    def _deliver(self, name, note):
        with self.network.lock:
            self.network.agents[name].inbox.setdefault(self.name, []).append(note)

    def _check_connected(self, handle):
        peer = self.network.agents[handle.owner]
        if (
            peer.dead
            or peer.life != self.known.get(handle.owner)
            or handle.connection != self.connections[handle.owner]
        ):
            raise RemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")

    def _advance(self, handle):
        if not self.network.frozen:
            handle.left -= 1
        if handle.left < 0 and handle.state == "PROC":
            for move in handle.moves:
                ctypes.memmove(*move)
            if handle.note:
                self._deliver(handle.owner, handle.note)
            handle.state = "DONE"
        return handle.state
