"""This process's end of NIXL: its agent of NIXL, the memory that it registers, and the peers that NIXL knows.

Source: NIXL 1.5.1, Python API of its agent. kvplan has no transport of its own between machines.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from kvplan.base.quoting import quoted
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.nixl_lists import memory_of

Span = tuple[int, int, str]  # address, bytes, device
DIRECT, PACKED = "direct", "packed"  # ways that need NIXL to know a peer

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
        refused: why NIXL cannot be used; None while that is not known.
        closed: whether it is closed.
    """

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
        self._peers: dict[str, dict[str, bytes]] = {}  # by name, the metadata of each way
        self._kept: list[tuple[Any, object]] = []  # handles that NIXL could not release yet, and what they access

    # ---- the agent of NIXL -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the agent of NIXL and register the layouts, if that was not done.

        Raises:
            PathError: NIXL is not installed, has none of these backends, or the memory is neither the CPU's nor CUDA's.
            KVPlanError: the given agent has another name.
            TransferError: NIXL cannot register the memory; or this end is closed.
        """
        with self.lock:
            self.check_open()
            if self.nixl is not None:
                return
            rows = _registrations(self.spans)
            made = self._given
            if made is None:
                made = _new_agent(self.name, list(self.backends), progress_thread=self._progress_thread)
            if (known := getattr(made, "name", self.name)) != self.name:
                raise KVPlanError(f"agent is called {known!r} by NIXL and {self.name!r} here; give it the same name")
            self.nixl = made
            try:
                for memory, some in rows.items():
                    self._registered.append(made.register_memory(some, memory))
            except Exception as error:
                self._deregister()
                raise TransferError(f"NIXL cannot register the memory of {self.name!r}: {in_words(error)}") from error

    def agent(self) -> Self:
        """Return this end, open; raise PathError if it cannot be opened."""
        if self.nixl is None or self.refused is not None:
            self.check_open()
            try:
                if self.refused is None:
                    self.open()
            except KVPlanError as error:
                self.refused = str(error)
            if self.refused is not None:
                raise PathError(self.refused)
        return self

    def check_open(self) -> None:
        """Raise TransferError if it is closed."""
        if self.closed:
            raise TransferError(f"the agent {self.name!r} is closed")

    def metadata(self) -> bytes | None:
        """Return NIXL's metadata for the card, or None if NIXL cannot be used."""
        try:
            with self.agent().lock:
                return bytes(self.nixl.get_agent_metadata())
        except Exception as error:  # noqa: BLE001  # the card says it
            self.refused = self.refused or f"NIXL gives no metadata of {self.name!r}: {in_words(error)}"
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

    def release(self, handle: Any = None, memory: object = None) -> None:
        """Release a handle of NIXL. One that is in use is aborted, and a later call releases it.

        Args:
            handle: the handle; None to release only those that could not be before.
            memory: what the handle accesses.
        """
        kept, self._kept = self._kept, []
        for one, its in [*kept, *([] if handle is None else [(handle, memory)])]:
            try:
                one.release()
            except Exception as error:  # noqa: BLE001  # it is kept, and its memory with it
                self._kept.append((one, its))
                log.debug("NIXL cannot release %r: %s", one, error)

    def close(self) -> None:
        """Remove all peers, and deregister the memory."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            for peer in list(self._peers):
                self._remove(peer)
            if self.nixl is not None:
                self.release()
                self._deregister()
            self._kept.clear()

    def _deregister(self) -> None:
        for registered in self._registered:
            try:
                self.nixl.deregister_memory(registered)
            except Exception as error:  # noqa: BLE001  # the rest must still be deregistered
                log.warning("NIXL keeps memory of %s registered: %s", self.name, in_words(error))
        self._registered.clear()
        self.nixl = None

    # ---- peers -------------------------------------------------------------------------------------------------------

    def add(self, peer: str, metadata: bytes, way: str) -> None:
        """Let NIXL know a peer, until :meth:`drop` was called for each way.

        Raises:
            TransferError: NIXL does not accept the metadata, for example since the peer was restarted; or it is of
                another agent.
        """
        with self.lock:
            self.check_open()
            self._add(peer, metadata)
            self._peers.setdefault(peer, {})[way] = metadata

    def hold(self, peer: str, way: str) -> None:
        """Let NIXL go on knowing a peer for this way, also if it is not known by whose metadata."""
        with self.lock:
            known = self._peers.setdefault(peer, {})
            known.setdefault(way, next(iter(known.values()), b""))

    def replace(self, peer: str, metadata: bytes, way: str) -> None:
        """Let NIXL know a peer that has restarted, in place of what it knew; see :meth:`add`."""
        with self.lock:
            self._remove(peer)
            self.add(peer, metadata, way)

    def renew(self, peer: str) -> None:
        """Connect to a peer anew; raise TransferError if NIXL does not take its metadata any more."""
        with self.lock:
            known = self._peers.get(peer, {})
            if any(known.values()):  # otherwise the engine of this process connects to it
                self._remove(peer)
                for way, metadata in known.items():
                    self.add(peer, metadata or max(known.values()), way)

    def drop(self, peer: str, way: str) -> None:
        """Undo :meth:`add`; NIXL forgets the peer if no other way needs it."""
        with self.lock:
            known = self._peers.get(peer, {})
            if known.pop(way, None) is not None and not known:
                self._remove(peer)

    def tell(self, peer: str, note: bytes) -> None:
        """Send a note to a peer that NIXL knows; raise TransferError if NIXL does not send it."""
        with self.lock:
            self.check_open()
            try:
                self.nixl.send_notif(peer, note)
            except Exception as error:
                raise TransferError(f"NIXL does not send the note to {peer!r}: {in_words(error)}") from error

    def _add(self, peer: str, metadata: bytes) -> None:
        try:
            told = self.nixl.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(f"NIXL does not take the metadata of {peer!r}: {in_words(error)}") from error
        name = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
        if name != peer:  # NIXL keeps it: another peer here may have that name
            raise TransferError(f"the metadata in the card of {peer!r} is of the agent {quoted(name)}")

    def _remove(self, peer: str) -> None:
        self._peers.pop(peer, None)
        try:
            self.nixl.remove_remote_agent(peer)
        except Exception as error:  # noqa: BLE001  # NIXL had removed it already
            log.debug("NIXL had forgotten %s: %s", peer, in_words(error))


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
