"""NIXL's agent within one process, with the whole interface that engines call; it moves bytes when it is looked at.

It refuses what NIXL 1.5.1 refuses (seen on the real one), and counts the transfers that it moves.
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


nixlNotPostedError, nixlNotFoundError, nixlInvalidParamError = map(_kind, ("NotPosted", "NotFound", "InvalidParam"))  # noqa: N816
nixlMismatchError, nixlRemoteDisconnectError = map(_kind, ("Mismatch", "RemoteDisconnect"))  # noqa: N816
nixlBackendError, nixlNoTelemetryError = map(_kind, ("Backend", "NoTelemetry"))  # noqa: N816
nixlRepostActiveError, nixlCancelledError = map(_kind, ("RepostActive", "Cancelled"))  # noqa: N816


class Descriptors(list):
    """A list of (address, bytes, device[, text]) of one kind of memory."""

    def __init__(self, kind, rows):
        super().__init__(tuple(row) for row in rows)
        self.kind = kind

    def getType(self):  # noqa: N802
        return SimpleNamespace(name=f"{self.kind}_SEG")

    def descCount(self):  # noqa: N802
        return len(self)

    def __reduce__(self):
        return Descriptors, (self.kind, list(self))


class Handle:
    def __init__(self, **facts):
        self.__dict__.update(facts)
        self.released = False

    def release(self):
        self.released = True


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


class Machine:
    """All agents that know each other."""

    def __init__(self):
        self.agents = {}
        self.lock = threading.RLock()
        self.frozen = False  # whether transfers stay in progress
        self.hook = None  # called with the name of a call, the agent, and the handle or the peer; it may raise

    def call(self, name, agent, what):
        if self.hook is not None:
            self.hook(name, agent, what)

    def agent(self, name, **more):
        made = self.agents[name] = DoubleAgent(self, name, **more)
        return made


class DoubleAgent:
    def __init__(self, machine, name):
        self.machine, self.name = machine, name
        self.backends = {"UCX": 1}
        self.memory, self.known, self.inbox = [], {}, {}
        self.removals = Counter()
        self.made = 0  # transfers made by NIXL
        self.counts = []  # descriptors of each of them
        self.life = 0

    def get_plugin_list(self):
        return ["UCX"]

    def get_reg_descs(self, descs, mem_type=None):
        return descs if isinstance(descs, Descriptors) else Descriptors(KINDS[mem_type], descs)

    def get_xfer_descs(self, descs, mem_type=None):
        return descs if isinstance(descs, Descriptors) else Descriptors(KINDS[mem_type], (row[:3] for row in descs))

    def get_serialized_descs(self, descs):
        return pickle.dumps(descs)

    def deserialize_descs(self, data):
        return pickle.loads(data)

    def register_memory(self, reg_list, mem_type=None, backends=()):
        made = self.get_reg_descs(reg_list, mem_type)
        self.memory += [(made.kind, *row[:2]) for row in made]
        return made

    def deregister_memory(self, descs, backends=()):
        for row in descs:
            self.memory.remove((descs.kind, *row[:2]))

    def get_agent_metadata(self):
        connections = field("t", b"UCX") + field("c", b"%d" % self.life)
        return b"nixlSerDes|" + field("Agent", self.name.encode()) + field("Conns", number(1)) + connections

    def get_partial_agent_metadata(self, descs, inc_conn_info=False, backends=()):
        assert inc_conn_info
        assert len(descs)
        return self.get_agent_metadata()

    def add_remote_agent(self, metadata):
        name, life = read(metadata)
        if self.known.get(name.decode(), int(life)) != int(life):
            raise nixlMismatchError("NIXL_ERR_NOT_ALLOWED")
        self.known[name.decode()] = int(life)
        return name

    def remove_remote_agent(self, name):
        self.known.pop(_text(name), None)
        self.removals[_text(name)] += 1

    def check_remote_metadata(self, name, descs=None):
        return _text(name) in self.known

    def prep_xfer_dlist(self, agent_name, xfer_list, mem_type=None, backends=()):
        name = _text(agent_name)
        if name not in {"", "NIXL_INIT_AGENT"} and name not in self.known:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        whose = self if name in {"", "NIXL_INIT_AGENT"} else self.machine.agents[name]
        kind = xfer_list.kind if isinstance(xfer_list, Descriptors) else KINDS[mem_type]
        rows = []
        for address, nbytes, _, *more in np.asarray(xfer_list).tolist():
            stride, count = more or (nbytes, 1)
            rows += [(address + k * stride, nbytes) for k in range(count)]
        for start, nbytes in rows:
            if not any(k == kind and a <= start and start + nbytes <= a + n for k, a, n in whose.memory):
                raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        return Handle(rows=rows, owner="" if whose is self else name, age=self.removals[name])

    def make_prepped_xfer(
        self, operation, local, local_indices, remote, remote_indices, notif_msg=b"", backends=(), skip_desc_merge=False
    ):
        assert operation in {"READ", "WRITE"}
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
        return Handle(moves=moves, owner=remote.owner, note=notif_msg, state="NEW", age=remote.age)

    def _check(self, handle):
        if handle.owner not in self.known or handle.age != self.removals[handle.owner]:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")  # the peer was removed since

    def initialize_xfer(self, operation, local, remote, remote_agent, notif_msg=b"", backends=()):
        sides = self.prep_xfer_dlist("", local), self.prep_xfer_dlist(remote_agent, remote)
        every = [range(len(side.rows)) for side in sides]
        return self.make_prepped_xfer(operation, sides[0], every[0], sides[1], every[1], notif_msg)

    def transfer(self, handle, notif_msg=b""):
        self._check(handle)
        self.machine.call("transfer", self, handle)
        handle.note, handle.state = notif_msg or handle.note, "PROC"
        return "PROC"

    def check_xfer_state(self, handle):
        if handle.state == "NEW":
            raise nixlNotPostedError("NIXL_ERR_NOT_POSTED")
        if handle.state == "PROC" and not self.machine.frozen:
            self.machine.call("look", self, handle)
            for move in handle.moves:
                ctypes.memmove(*move)
            handle.state = "DONE"
            if handle.note:
                self.send_notif(handle.owner, handle.note)
        return handle.state

    def get_xfer_telemetry(self, handle):
        return SimpleNamespace(totalBytes=sum(nbytes for *_, nbytes in handle.moves), descCount=len(handle.moves))

    def query_xfer_backend(self, handle):
        return "UCX"

    def estimate_xfer_cost(self, handle):
        return 1, 1, "UNKNOWN"

    def send_notif(self, name, notif_msg, backend=None):
        if _text(name) not in self.known:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        self.machine.call("notify", self, _text(name))
        with self.machine.lock:
            self.machine.agents[_text(name)].inbox.setdefault(self.name, []).append(bytes(notif_msg))

    def get_new_notifs(self, backends=()):
        with self.machine.lock:
            found, self.inbox = self.inbox, {}
        return found


class LoneAgent(DoubleAgent):
    """An agent whose peers are in other processes: notes go by a folder, and transfers are all left to kvplan."""

    def __init__(self, folder, name):
        super().__init__(Machine(), name)
        self.folder = folder
        (folder / name).mkdir(exist_ok=True)

    def prep_xfer_dlist(self, agent_name, xfer_list, mem_type=None, backends=()):
        name = _text(agent_name)
        if name in self.known:
            return Handle(owner=name, age=self.removals[name])
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


def _text(name):
    return name.decode() if isinstance(name, bytes) else name
