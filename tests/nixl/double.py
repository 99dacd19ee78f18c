"""NIXL in one process: agents that know each other by name, and do at a look what a NIC would do at its leisure.

Refuses what NIXL 1.5.1 refuses (seen on the real one): unknown peers, lists of no rows, memory that nobody registered,
lists of unlike lengths, indices past the end, a peer met a second time with other metadata, handles of a peer that was
removed since. It counts the transfers that it makes.
"""

from __future__ import annotations

import ctypes
import pickle
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np

from kvplan.engines.nixl.descriptor_rows import KINDS


def _kind(name):
    return type(f"nixl{name}Error", (Exception,), {})


nixlNotPostedError, nixlNotFoundError, nixlInvalidParamError = map(_kind, ("NotPosted", "NotFound", "InvalidParam"))
nixlMismatchError, nixlRemoteDisconnectError = map(_kind, ("Mismatch", "RemoteDisconnect"))
nixlBackendError, nixlNoTelemetryError = map(_kind, ("Backend", "NoTelemetry"))
nixlRepostActiveError, nixlCancelledError = map(_kind, ("RepostActive", "Cancelled"))


class Network:
    """All agents, and what is to go wrong.

    ``failures`` are "register", "make", "post", "look", "err", "half", "notify" or "release", each used up by the call
    that it meets. ``hook`` is called with "transfer", "look" or "notify", the agent, and the handle or the peer; it may
    raise.
    """

    def __init__(self, looks=2, failures=()):
        self.agents, self.looks, self.failures = {}, looks, list(failures)  # looks at a transfer, before it is done
        self.frozen, self.hook, self.lock = False, None, threading.RLock()  # frozen: nothing moves

    def agent(self, name):
        return Agent(self, name)

    def check_released(self):
        """Check that no agent has a handle, or registered memory, any more."""
        assert not any(one.live for one in self.agents.values()), "a handle was left"
        assert not any(one.memory for one in self.agents.values())

    def fails(self, *calls):
        """Return the first failure, if it is one of these."""
        return self.failures.pop(0) if self.failures and self.failures[0] in calls else None

    def call(self, name, agent, what):
        if self.hook is not None:
            self.hook(name, agent, what)


class Descriptors(list):
    """A list of (address, bytes, device[, text]) of one kind of memory."""

    def __init__(self, kind, rows):
        super().__init__(tuple(row) for row in rows)
        self.kind = kind

    def getType(self):
        return SimpleNamespace(name=f"{self.kind}_SEG")

    def descCount(self):
        return len(self)

    def __reduce__(self):
        return Descriptors, (self.kind, list(self))


class Handle:
    """A list that is prepared, or a transfer; of ``owner``'s memory, which is the removals of that peer old."""

    released = False

    def __init__(self, agent, **facts):
        self.agent = agent
        self.__dict__.update(facts)
        agent.live.append(self)

    def release(self):
        if not self.released:
            if self.agent.network.fails("release"):
                raise nixlRepostActiveError("NIXL_ERR_REPOST_ACTIVE")
            self.released = True
            self.agent.live.remove(self)


class Agent:
    def __init__(self, network, name, life=0):
        self.network, self.name, self.life = network, name, life
        self.backends, self.dead = {"UCX": 1}, False
        self.memory, self.live = [], []
        self.known, self.inbox, self.removals = {}, {}, Counter()  # known: by peer, its life
        self.made, self.counts = 0, []  # transfers, and the descriptors of each
        network.agents[name] = self

    # ---- memory and metadata -----------------------------------------------------------------------------------------

    def get_plugin_list(self):
        return ["UCX"]

    def get_reg_descs(self, descs, mem_type=None):
        return descs if isinstance(descs, Descriptors) else Descriptors(KINDS[mem_type], descs)

    def get_xfer_descs(self, descs, mem_type=None):
        return descs if isinstance(descs, Descriptors) else Descriptors(KINDS[mem_type], descs)

    def get_serialized_descs(self, descs):
        return pickle.dumps(descs)

    def deserialize_descs(self, data):
        return pickle.loads(data)

    def register_memory(self, reg_list, mem_type=None, backends=()):
        if self.network.fails("register"):
            raise nixlNotFoundError("NIXL_ERR_BACKEND")
        made = self.get_reg_descs(reg_list, mem_type)
        self.memory += [(made.kind, *map(int, row[:3])) for row in made]
        return made

    def deregister_memory(self, descs, backends=()):
        for row in descs:
            self.memory.remove((descs.kind, *row[:3]))

    def get_agent_metadata(self):
        connections = field("t", b"UCX") + field("c", b"%d" % self.life)
        return b"nixlSerDes|" + field("Agent", self.name.encode()) + field("Conns", number(1)) + connections

    def get_partial_agent_metadata(self, descs, inc_conn_info=False, backends=()):
        assert inc_conn_info
        assert backends == ["UCX"]
        assert len(descs)
        return self.get_agent_metadata()

    def add_remote_agent(self, metadata):
        name, life = read(metadata)
        if self.known.setdefault(name.decode(), life) != life:
            raise nixlMismatchError("NIXL_ERR_NOT_ALLOWED")
        return name

    def remove_remote_agent(self, name):
        if self.known.pop(_text(name), None) is None:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        self.removals[_text(name)] += 1

    def check_remote_metadata(self, name, descs=None):
        return _text(name) in self.known

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def prep_xfer_dlist(self, agent_name, xfer_list, mem_type=None, backends=()):
        xfer_list[0]  # NIXL's own IndexError of an empty list
        name = "" if _text(agent_name) == "NIXL_INIT_AGENT" else _text(agent_name)
        if name and name not in self.known:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        memory = self.network.agents[name or self.name].memory
        kind = xfer_list.kind if isinstance(xfer_list, Descriptors) else KINDS[mem_type]
        rows = []
        for address, nbytes, device, *more in np.asarray(xfer_list).tolist():
            stride, count = more or (nbytes, 1)
            for start in range(address, address + count * stride, stride):
                if not any(
                    (k, d) == (kind, device) and a <= start and start + nbytes <= a + n for k, a, n, d in memory
                ):
                    raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
                rows.append((start, nbytes))
        return Handle(self, rows=rows, owner=name, age=self.removals[name])

    def make_prepped_xfer(
        self, operation, local, local_indices, remote, remote_indices, notif_msg=b"", backends=(), skip_desc_merge=False
    ):
        assert operation in {"READ", "WRITE"}
        assert remote.owner
        assert not local.owner
        if self.network.fails("make"):
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        if local.released or remote.released:
            raise nixlInvalidParamError("NIXL_ERR_INVALID_PARAM")
        self._check(remote)
        pairs = list(zip(local_indices, remote_indices, strict=False))
        if len(local_indices) != len(remote_indices) or not pairs:
            raise nixlInvalidParamError("NIXL_ERR_INVALID_PARAM")
        moves = []
        for a, b in pairs:
            if not (0 <= a < len(local.rows) and 0 <= b < len(remote.rows) and local.rows[a][1] == remote.rows[b][1]):
                raise nixlInvalidParamError("NIXL_ERR_INVALID_PARAM")
            (mine, nbytes), (theirs, _) = local.rows[a], remote.rows[b]
            moves.append((mine, theirs, nbytes) if operation == "READ" else (theirs, mine, nbytes))
        self.made += 1
        self.counts.append(len(moves))
        return Handle(self, moves=moves, owner=remote.owner, note=notif_msg, state="NEW", age=remote.age, left=0)

    def _check(self, handle):
        if handle.owner not in self.known or handle.age != self.removals[handle.owner]:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")  # the peer was removed since

    def initialize_xfer(self, operation, local, remote, remote_agent, notif_msg=b"", backends=()):
        sides = []
        try:
            for name, rows in (("", local), (remote_agent, remote)):
                sides.append(self.prep_xfer_dlist(name, rows))
            every = [range(len(side.rows)) for side in sides]
            return self.make_prepped_xfer(operation, sides[0], every[0], sides[1], every[1], notif_msg)
        finally:
            for side in sides:
                self.live.remove(side)

    def transfer(self, handle, notif_msg=b""):
        assert not handle.released
        assert handle.state != "PROC", "NIXL_ERR_REPOST_ACTIVE"
        self._check(handle)
        if self.network.fails("post"):
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        self._check_lives(handle.owner)
        self.network.call("transfer", self, handle)
        handle.note, handle.state, handle.left = notif_msg or handle.note, "PROC", self.network.looks
        return self._advance(handle)

    def check_xfer_state(self, handle):
        if handle.state == "NEW":
            raise nixlNotPostedError("NIXL_ERR_NOT_POSTED")
        failure = self.network.fails("look", "err", "half")
        if failure == "err":
            return "ERR"
        for move in handle.moves[: len(handle.moves) // 2] if failure == "half" else ():
            ctypes.memmove(*move)
        if failure:
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        self._check_lives(handle.owner)
        if handle.state == "PROC" and not self.network.frozen:
            self.network.call("look", self, handle)
        return self._advance(handle)

    def _advance(self, handle):
        handle.left -= not self.network.frozen
        if handle.left < 0 and handle.state == "PROC":
            for move in handle.moves:
                ctypes.memmove(*move)
            handle.state = "DONE"
            if handle.note:
                self.send_notif(handle.owner, handle.note)
        return handle.state

    def _check_lives(self, name):
        peer = self.network.agents[name]
        if peer.dead or peer.life != self.known.get(name):
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")

    def get_xfer_telemetry(self, handle):
        return SimpleNamespace(totalBytes=sum(nbytes for *_, nbytes in handle.moves), descCount=len(handle.moves))

    def query_xfer_backend(self, handle):
        return "UCX"

    def estimate_xfer_cost(self, handle):
        return 1, 1, "UNKNOWN"

    # ---- notifications -----------------------------------------------------------------------------------------------

    def send_notif(self, name, notif_msg, backend=None):
        name = _text(name)
        if name not in self.known:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        if self.network.fails("notify") or self.network.agents[name].dead:
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        self.network.call("notify", self, name)
        with self.network.lock:
            self.network.agents[name].inbox.setdefault(self.name, []).append(bytes(notif_msg))

    def get_new_notifs(self, backends=()):
        with self.network.lock:
            found, self.inbox = self.inbox, {}
        return found


class LoneAgent(Agent):
    """An agent whose peers are in other processes: notes go by a folder, and transfers are all left to kvplan."""

    def __init__(self, folder, name):
        super().__init__(Network(), name)
        self.folder = folder
        (folder / name).mkdir(exist_ok=True)

    def prep_xfer_dlist(self, agent_name, xfer_list, mem_type=None, backends=()):
        name = _text(agent_name)
        if name in self.known:
            return Handle(self, owner=name, age=self.removals[name])
        return super().prep_xfer_dlist(agent_name, xfer_list, mem_type, backends)

    def make_prepped_xfer(self, operation, local, local_indices, remote, *given, **named):
        self._check(remote)
        raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")

    def send_notif(self, name, notif_msg, backend=None):
        if _text(name) not in self.known:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        note = self.folder / f"{time.time_ns()}-{self.name}"
        note.write_bytes(notif_msg)
        note.rename(self.folder / _text(name) / note.name)

    def get_new_notifs(self, backends=()):
        found = {}
        for note in sorted((self.folder / self.name).iterdir()):
            found.setdefault(note.name.partition("-")[2], []).append(note.read_bytes())
            note.unlink()
        return found


def number(value):
    return value.to_bytes(8, "little")


def field(tag, content):
    return tag.encode() + number(len(content)) + content + b"|"


def read(metadata):
    """Return the name and the life of an agent; refuse bytes that NIXL would not read, and skip unknown backends."""
    lives, left = [], metadata.removeprefix(b"nixlSerDes|")

    def take(tag):
        nonlocal left
        size = int.from_bytes(left[len(tag) : len(tag) + 8], "little")
        content, end = left[len(tag) + 8 :][:size], left[len(tag) + 8 + size :]
        if left == metadata or not left.startswith(tag) or end[:1] != b"|":
            raise nixlMismatchError("NIXL_ERR_MISMATCH")
        left = end[1:]
        return content

    name, count = take(b"Agent"), int.from_bytes(take(b"Conns"), "little")
    for _ in range(count):
        backend, data = take(b"t"), take(b"c")
        lives += [data] * (backend == b"UCX")
    if left or not lives:
        raise nixlMismatchError("NIXL_ERR_MISMATCH")
    return name, int(lives[0])


def _text(name):
    return name.decode() if isinstance(name, bytes) else name
