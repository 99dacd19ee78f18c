"""This process's end of NIXL: its agent, the memory that it registers, the peers that NIXL knows, and wires to them.

Source: NIXL 1.5.1, Python API of its agent. kvplan has no transport of its own between machines.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from kvplan.agents.packed.ring import Place
from kvplan.base.quoting import quoted
from kvplan.base.threads import error_of
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.nixl_lists import memory_of

Span = tuple[int, int, str]  # address, bytes, device
KEPT_WRITES = 1024  # most prepared writes that wait to be posted again; then all are released

_FIRST = np.zeros(1, dtype=np.int32)

log = logging.getLogger("kvplan.agents")


def in_words(error: BaseException) -> str:
    """Return an error of NIXL as a message shows it."""
    return f"{type(error).__name__}: {error}"


def spans_of(layouts: Iterable[KVLayout]) -> frozenset[Span]:
    """Return address, bytes and device of every region of some layouts."""
    return frozenset((r.address, r.nbytes, r.device) for layout in layouts for r in layout.regions)


class NixlEnd:
    """This process's end of NIXL. Its agent of NIXL is made with the first card, or when the first peer is met.

    Args:
        name: name of the agent.
        layouts: layouts to register.
        agent: an existing ``nixl_agent``, or None.
        backends: names of NIXL's backends.
        progress_thread: whether a new agent gets NIXL's own thread, which takes a whole core.

    Attributes:
        name, layouts, backends: as given.
        spans: the memory that it registers.
        nixl: the ``nixl_agent``; None before it is needed, and after the close.
        lock: held in every call of NIXL.
        refused: why NIXL gave no metadata for the last card, or None.
        closed: whether it is closed.
        ring: NIXL's name of the memory of the ring of packed transfers, and the number of its device.
    """

    ring = "DRAM", 0

    def __init__(
        self, name: str, layouts: Mapping[str, KVLayout], agent: Any, backends: Sequence[str], *, progress_thread: bool
    ) -> None:
        self.name, self.layouts, self.backends = name, dict(layouts), tuple(backends)
        self.spans = spans_of(self.layouts.values())
        self.nixl: Any = None
        self.lock = threading.RLock()
        self.refused: str | None = None
        self.closed = False
        self._given, self._progress_thread = agent, progress_thread
        self._registered: list[Any] = []
        self._ring: Any = None  # as NIXL has registered it
        self._metadata: dict[str, dict[bytes, None]] = {}  # by peer
        self._users = Counter[str]()  # of each peer
        self._kept: list[tuple[Any, object]] = []  # handles that NIXL could not release yet, and what they access

    # ---- the agent of NIXL -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the agent of NIXL and register the layouts, if that was not done.

        Raises:
            PathError: NIXL is not installed, has none of these backends, or the memory is neither the CPU's nor CUDA's.
            KVPlanError: the given agent has another name.
            TransferError: NIXL cannot register the memory; or this end is closed.
        """
        with self.calling(f"cannot register the memory of {self.name!r}"):
            if self.nixl is not None:
                return
            rows = _registrations(self.spans)
            nixl = self._given or _new_agent(self.name, list(self.backends), progress_thread=self._progress_thread)
            if (known := getattr(nixl, "name", self.name)) != self.name:
                raise KVPlanError(f"agent is called {known!r} by NIXL and {self.name!r} here; give it the same name")
            self.nixl = nixl
            try:
                for memory, some in rows.items():
                    self._registered.append(nixl.register_memory(some, memory))
            except Exception:
                self._deregister(self._registered)
                self.nixl = None
                raise

    @contextmanager
    def calling(self, what: str) -> Iterator[Any]:
        """Hold the lock in calls of NIXL's agent, which the block gets.

        Args:
            what: what NIXL cannot do if it raises an error, which becomes a TransferError.
        """
        with self.lock:
            self.check_open()
            try:
                yield self.nixl
            except KVPlanError:
                raise
            except Exception as error:
                raise TransferError(f"NIXL {what}: {in_words(error)}") from error

    def agent(self) -> Self:
        """Return this end, open; raise PathError if it cannot be opened, and TransferError if it is closed."""
        self.check_open()
        try:
            self.open()
        except KVPlanError as error:
            raise PathError(str(error)) from error
        return self

    def check_open(self) -> None:
        """Raise TransferError if it is closed."""
        if self.closed:
            raise TransferError(f"the agent {self.name!r} is closed")

    def metadata(self) -> bytes | None:
        """Return NIXL's metadata for the card, or None if NIXL cannot be used: see :attr:`refused`."""
        try:
            with self.agent().calling(f"gives no metadata of {self.name!r}") as nixl:
                return bytes(nixl.get_agent_metadata())
        except KVPlanError as error:  # the card says it
            self.refused = str(error)
            return None

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the notes that have come through NIXL since the last call, each with the peer."""
        with self.lock:
            found = {} if self.nixl is None else self.nixl.get_new_notifs()
        return [
            (name.decode() if isinstance(name, bytes) else str(name), bytes(note))
            for name, notes in found.items()
            for note in notes
        ]

    def release(self, *handles: Any, memory: object = None) -> None:
        """Release handles of NIXL, and those that could not be before. One in use is aborted, and released later.

        Args:
            handles: the handles; None are left out.
            memory: what they access.
        """
        kept, self._kept = self._kept, []
        for handle, its in [*kept, *((handle, memory) for handle in handles if handle is not None)]:
            try:
                handle.release()
            except Exception as error:  # noqa: BLE001  # it is kept, and its memory with it
                self._kept.append((handle, its))
                log.debug("NIXL cannot release %r: %s", handle, error)

    # ---- the ring of packed transfers --------------------------------------------------------------------------------

    def add_ring(self, address: int, nbytes: int, device: str) -> None:
        """Register the memory of a ring, so that peers can write there.

        Raises:
            PathError: the memory is neither the CPU's nor CUDA's, or NIXL cannot be used.
            TransferError: NIXL cannot register it.
        """
        memory, number = memory_of(device, "the ring")
        with self.agent().calling(f"cannot register the ring of {self.name!r}") as nixl:
            self._ring = nixl.register_memory(np.array([(address, nbytes, number)], np.int64), memory)
            self.ring = memory, number

    def ring_metadata(self) -> bytes:
        """Return the metadata that a peer needs to write to the ring and to send notes.

        Raises:
            TransferError: NIXL gives no metadata, or this end is closed.
        """
        with self.calling(f"gives no metadata of {self.name!r}") as nixl:
            backends = list(nixl.backends)
            return bytes(nixl.get_partial_agent_metadata(self._ring, inc_conn_info=True, backends=backends))

    def drop_ring(self) -> None:
        """Deregister the ring. No write may move any more."""
        with self.lock:
            self._deregister([self._ring])

    def close(self) -> None:
        """Remove all peers, and deregister the memory."""
        with self.lock:
            if not self.closed:
                self.closed = True
                for peer in list(self._metadata):
                    self._remove(peer)
                self.release()
                self._deregister(self._registered)
                self.nixl = None
                self._kept.clear()

    def _deregister(self, registered: list[Any]) -> None:
        while registered:
            error = error_of(partial(self.nixl.deregister_memory, registered.pop()))
            if error is not None:  # the rest must still be deregistered
                log.warning("NIXL keeps memory of %s registered: %s", self.name, in_words(error))

    # ---- peers -------------------------------------------------------------------------------------------------------

    def add(self, peer: str, metadata: bytes) -> None:
        """Let NIXL know a peer, or more of it.

        Raises:
            TransferError: NIXL does not accept the metadata, for example since the peer was restarted; or it is of
                another agent.
        """
        with self.calling(f"does not take the metadata of {peer!r}") as nixl:
            told = nixl.add_remote_agent(metadata)
            name = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
            if name != peer:  # NIXL keeps it: another peer here may have that name
                raise TransferError(f"the metadata in the card of {peer!r} is of the agent {quoted(name)}")
            self._metadata.setdefault(peer, {})[metadata] = None

    def replace(self, peer: str, metadata: bytes) -> None:
        """Let NIXL know a peer that has restarted, in place of what it knew; see :meth:`add`."""
        with self.lock:
            self._remove(peer)
            self.add(peer, metadata)

    def renew(self, peer: str) -> None:
        """Connect to a peer anew; raise TransferError if NIXL does not take its metadata any more."""
        with self.lock:
            if known := self._metadata.get(peer):  # otherwise the engine of this process connects to it
                self._remove(peer)
                # The newest first: after a restart, NIXL takes no more of what was known before.
                errors = [error_of(partial(self.add, peer, metadata)) for metadata in reversed(known)]
                if errors[0] is not None:
                    raise errors[0]

    def hold(self, peer: str) -> None:
        """Let NIXL go on knowing a peer until :meth:`drop` was called as often."""
        with self.lock:
            self._users[peer] += 1

    def drop(self, peer: str) -> None:
        """Undo :meth:`hold`; NIXL forgets the peer if nobody needs it."""
        with self.lock:
            self._users[peer] -= 1
            if not self._users[peer]:
                del self._users[peer]
                self._remove(peer)

    def wire(self, peer: str) -> NixlWire:
        """Return a wire for packed transfers with a peer."""
        return NixlWire(self, peer)

    def tell(self, peer: str, note: bytes) -> None:
        """Send a note to a peer that NIXL knows; raise TransferError if NIXL does not send it."""
        with self.calling(f"does not send the note to {peer!r}") as nixl:
            nixl.send_notif(peer, note)

    def _remove(self, peer: str) -> None:
        self._metadata.pop(peer, None)
        error_of(lambda: self.nixl.remove_remote_agent(peer))  # NIXL may have removed it already


class Write:
    """One write that NIXL has prepared; it is posted again after each end.

    Attributes:
        key: address here, address there, and bytes.
        handles: NIXL's: the write's, and those of its two lists.
        state: as NIXL has told it; otherwise why it failed.
    """

    __slots__ = ("handles", "key", "state")

    def __init__(self, key: tuple[int, int, int], handles: list[Any]) -> None:
        self.key, self.handles, self.state = key, handles, "NEW"


class NixlWire:
    """The wire to one peer by NIXL; see :class:`kvplan.agents.packed.line.Wire`.

    A write over shared memory is copied while it is posted; the interpreter is free meanwhile.

    Args:
        end: this process's end of NIXL, which has the ring.
        peer: name of the peer.

    Attributes:
        peer: name of the peer.
        gone: whether NIXL has reported that the peer is gone.
    """

    def __init__(self, end: NixlEnd, peer: str) -> None:
        self.peer, self.gone = peer, False
        self._end = end
        self._theirs = ("DRAM", 0)
        self._idle: dict[tuple[int, int, int], Write] = {}  # those that have ended, to be posted again
        end.hold(peer)

    def metadata(self) -> bytes:
        """See :class:`kvplan.agents.packed.line.Wire`."""
        return self._end.ring_metadata()

    def join(self, metadata: bytes, place: Place) -> None:
        """See :class:`kvplan.agents.packed.line.Wire`; a peer that has restarted replaces the one that was known."""
        try:
            self._end.add(self.peer, metadata)
        except KVPlanError:
            self._end.replace(self.peer, metadata)
        self._theirs = memory_of(place.device, f"the ring of {self.peer!r}")

    def renew(self) -> None:
        """See :class:`kvplan.agents.packed.line.Wire`."""
        self._end.renew(self.peer)

    def send(self, note: bytes) -> None:
        """See :class:`kvplan.agents.packed.line.Wire`."""
        with self._calling() as nixl:
            nixl.send_notif(self.peer, note)

    def write(self, local: int, remote: int, nbytes: int, note: bytes) -> Write:
        """See :class:`kvplan.agents.packed.line.Wire`."""
        key = local, remote, nbytes
        with self._calling() as nixl:
            write = self._idle.pop(key, None) or self._prepared(nixl, key)
            self._ask(write, nixl.transfer, note)
            return write

    def over(self, handle: Write) -> bool:
        """See :class:`kvplan.agents.packed.line.Wire`."""
        with self._end.lock:
            if handle.state == "PROC":
                self._ask(handle, self._end.nixl.check_xfer_state)
            if handle.state == "DONE":
                if len(self._idle) >= KEPT_WRITES:
                    self._release_idle()
                self._idle[handle.key] = handle
            elif handle.state != "PROC":
                self.gone |= "DISCONNECT" in handle.state
                raise TransferError(f"NIXL cannot write to {self.peer!r}: {handle.state}")
            return handle.state == "DONE"

    def release(self, handle: Write) -> bool:
        """See :class:`kvplan.agents.packed.line.Wire`."""
        with self._end.lock:
            if error_of(handle.handles[0].release) is not None:  # it is in use; NIXL has begun to abort it
                return False
            self._end.release(*handle.handles[1:])
            return True

    def close(self) -> None:
        """See :class:`kvplan.agents.packed.line.Wire`."""
        with self._end.lock:
            self._release_idle()
            self._end.drop(self.peer)

    def _ask(self, write: Write, call: Callable[..., str], *more: Any) -> None:
        try:
            write.state = call(write.handles[0], *more)
        except Exception as error:  # noqa: BLE001  # whether its bytes move is not known
            write.state = in_words(error)

    def _release_idle(self) -> None:
        for write in self._idle.values():
            self._end.release(*write.handles)
        self._idle.clear()

    def _prepared(self, nixl: Any, key: tuple[int, int, int]) -> Write:
        local, remote, nbytes = key
        lists = list[Any]()
        try:
            for whose, start, place in (("NIXL_INIT_AGENT", local, self._end.ring), (self.peer, remote, self._theirs)):
                row = np.array([(start, nbytes, place[1])], dtype=np.int64)
                lists.append(nixl.prep_xfer_dlist(whose, row, place[0]))
            write = nixl.make_prepped_xfer("WRITE", lists[0], _FIRST, lists[1], _FIRST, b"")
        except Exception:
            self._end.release(*lists)
            raise
        return Write(key, [write, *lists])

    @contextmanager
    def _calling(self) -> Iterator[Any]:
        try:
            with self._end.calling(f"cannot reach {self.peer!r}") as nixl:
                yield nixl
        except TransferError as error:
            self.gone |= "DISCONNECT" in str(error)
            raise


class NixlOffer(NamedTuple):
    """NIXL's part of a card.

    Attributes:
        metadata: NIXL's metadata.
        packed: version of the packed way that the peer takes; 0 if it takes none.
    """

    metadata: bytes
    packed: int = 0

    def part(self) -> dict[str, object]:
        """Return the part as a card holds it.

        >>> NixlOffer.of(NixlOffer(b"met", 1).part())
        NixlOffer(metadata=b'met', packed=1)
        """
        return {"metadata": self.metadata.hex()} | ({"packed": self.packed} if self.packed else {})

    @classmethod
    def of(cls, part: dict[str, Any]) -> NixlOffer:
        """Read the part of a card."""
        return cls(bytes.fromhex(part["metadata"]), part.get("packed", 0))


def _new_agent(name: str, backends: list[str], *, progress_thread: bool) -> Any:
    try:
        from nixl import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise PathError(f"transfers between processes need NIXL: pip install nixl ({error})") from error
    try:
        made = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress_thread, backends=backends))
    except Exception as error:
        raise PathError(f"NIXL cannot make an agent here: {in_words(error)}") from error
    if not any(backend in made.backends for backend in backends):
        raise PathError(f"NIXL here has none of the backends {backends}; it has {made.get_plugin_list()}")
    return made


def _registrations(spans: frozenset[Span]) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the rows to register with NIXL, by kind of memory, without spans that lie inside another span."""
    kept: dict[str, list[tuple[int, int, int]]] = {}
    ends: dict[str, int] = {}
    for address, nbytes, device in sorted(spans, key=lambda span: (span[2], span[0], -span[1])):
        if address + nbytes <= ends.get(device, 0):
            continue
        ends[device] = address + nbytes
        memory, number = memory_of(device, "a layout")
        kept.setdefault(memory, []).append((address, nbytes, number))
    return {memory: np.array(rows, dtype=np.int64) for memory, rows in kept.items()}
