"""This process's end of NIXL: its agent, the memory that it registers, the peers that NIXL knows, and wires to them.

Source: NIXL 1.5.1, Python API of its agent. kvplan has no transport of its own between machines.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from kvplan.agents.packed.ring import Place
from kvplan.base.threads import error_of
from kvplan.base.values import quoted
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.descriptors import memory_of

Span = tuple[int, int, str]  # address, bytes, device
MOVING, DONE = "PROC", "DONE"  # NIXL's states of a transfer

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
        others: names of peers that NIXL knows for others, too, and goes on knowing.

    Attributes:
        name, layouts, backends: as given.
        spans: the memory that it registers.
        nixl: the ``nixl_agent``; None before it is needed, and after the close.
        lock: held in every call of NIXL.
        closed: whether it is closed.
        ring: NIXL's name of the memory of the ring of packed transfers, and the number of its device.
    """

    nixl: Any = None
    closed = False
    ring = "DRAM", 0

    def __init__(
        self, name: str, layouts: Mapping[str, KVLayout], agent: Any, backends: Sequence[str],
        *, progress_thread: bool, others: Container[str] = (),
    ) -> None:  # fmt: skip
        self.name, self.layouts, self.backends = name, dict(layouts), tuple(backends)
        self.spans, self.lock = spans_of(self.layouts.values()), threading.RLock()
        self._given, self._progress_thread, self._others = agent, progress_thread, others
        self._registered, self._ring = list[Any](), list[Any]()  # as NIXL has registered them
        self._metadata: dict[str, dict[bytes, None]] = {}  # by peer
        self._users = Counter[str]()  # of each peer
        self._kept: list[tuple[Any, object]] = []  # handles that NIXL could not release yet, and what they access

    # ---- the agent of NIXL -------------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Make the agent of NIXL and register the layouts, if that was not done; return this end.

        Raises:
            PathError: NIXL is not installed, has none of these backends, or the memory is neither the CPU's nor CUDA's.
            KVPlanError: the given agent has another name.
            TransferError: NIXL cannot register the memory; or this end is closed.
        """
        with self.calling(f"cannot register the memory of {self.name!r}"):
            if self.nixl is None:
                rows = _registrations(self.spans)
                nixl = self._given or _new_agent(self.name, list(self.backends), progress_thread=self._progress_thread)
                if (known := getattr(nixl, "name", self.name)) != self.name:
                    raise KVPlanError(
                        f"agent is called {known!r} by NIXL and {self.name!r} here; give it the same name"
                    )
                self.nixl = nixl
                try:
                    for memory, some in rows.items():
                        self._registered.append(nixl.register_memory(some, memory))
                except Exception:
                    self._deregister(self._registered)
                    self.nixl = None
                    raise
        return self

    @contextmanager
    def calling(self, what: str) -> Iterator[Any]:
        """Hold the lock in calls of NIXL's agent, which the block gets.

        Args:
            what: what NIXL cannot do if it raises an error, which becomes a TransferError.

        Raises:
            TransferError: NIXL has raised an error; or this end is closed.
        """
        with self.lock:
            if self.closed:
                raise TransferError(f"the agent {self.name!r} is closed")
            try:
                yield self.nixl
            except KVPlanError:
                raise
            except Exception as error:
                raise TransferError(f"NIXL {what}: {in_words(error)}") from error

    def metadata(self) -> bytes:
        """Return NIXL's metadata for the card; raise KVPlanError if NIXL cannot be used."""
        with self.open().calling(f"gives no metadata of {self.name!r}") as nixl:
            return bytes(nixl.get_agent_metadata())

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the notes that have come through NIXL since the last call, each with the peer."""
        with self.lock:
            came = {} if self.nixl is None else self.nixl.get_new_notifs()
        return [(_text(name), bytes(note)) for name, notes in came.items() for note in notes]

    def release(self, *handles: Any, memory: object = None) -> None:
        """Release handles of NIXL, and those that could not be before. One in use is aborted, and released later.

        Args:
            handles: the handles.
            memory: what they access.
        """
        waiting, self._kept = [*self._kept, *((handle, memory) for handle in handles)], []
        for each in waiting:
            if (error := error_of(each[0].release)) is not None:  # it is kept, and its memory with it
                self._kept.append(each)
                log.debug("NIXL cannot release %r: %s", each[0], error)

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

    # ---- the ring of packed transfers --------------------------------------------------------------------------------

    def add_ring(self, address: int, nbytes: int, device: str) -> None:
        """Register the memory of a ring, so that peers can write there.

        Raises:
            PathError: the memory is neither the CPU's nor CUDA's, or NIXL cannot be used.
            TransferError: NIXL cannot register it.
        """
        memory, number = memory_of(device, "the ring")
        with self.open().calling(f"cannot register the ring of {self.name!r}") as nixl:
            self._ring.append(nixl.register_memory(np.array([(address, nbytes, number)], np.int64), memory))
            self.ring = memory, number

    def ring_metadata(self) -> bytes:
        """Return the metadata that a peer needs to write to the ring and to send notes.

        Raises:
            TransferError: NIXL gives no metadata, or this end is closed.
        """
        with self.calling(f"gives no metadata of {self.name!r}") as nixl:
            backends = list(nixl.backends)
            return bytes(nixl.get_partial_agent_metadata(self._ring[0], inc_conn_info=True, backends=backends))

    def drop_ring(self) -> None:
        """Deregister the ring. No write may move any more."""
        with self.lock:
            self._deregister(self._ring)

    def wire(self, peer: str) -> NixlWire:
        """Return a wire for packed transfers with a peer."""
        return NixlWire(self, peer)

    # ---- peers -------------------------------------------------------------------------------------------------------

    def meet(self, peer: str, metadata: bytes) -> bool:
        """Let NIXL know a peer until :meth:`drop`; see :meth:`add`."""
        with self.lock:  # meanwhile, the last user of the peer's earlier life would let NIXL forget it
            self.hold(peer)
            try:
                return self.add(peer, metadata)
            except KVPlanError:
                self.drop(peer)
                raise

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

    def add(self, peer: str, metadata: bytes) -> bool:
        """Let NIXL know a peer, or more of it; return whether that replaces what it knew, since the peer has restarted.

        Raises:
            TransferError: NIXL does not accept the metadata; or it is of another agent.
        """
        with self.lock:
            try:
                self._load(peer, metadata)
            except TransferError:
                if peer not in self._metadata:
                    raise
                self._remove(peer)
                self._load(peer, metadata)
                return True
            return False

    def renew(self, peer: str) -> None:
        """Connect to a peer anew; raise TransferError if NIXL does not take its metadata any more."""
        with self.lock:
            if known := self._metadata.get(peer):  # otherwise the engine of this process connects to it
                self._remove(peer)
                # The newest first: after a restart, NIXL takes no more of what was known before.
                errors = [error_of(partial(self._load, peer, metadata)) for metadata in reversed(known)]
                if errors[0] is not None:
                    raise errors[0]

    def tell(self, peer: str, note: bytes) -> None:
        """Send a note to a peer that NIXL knows; raise TransferError if NIXL does not send it."""
        with self.calling(f"does not send the note to {peer!r}") as nixl:
            nixl.send_notif(peer, note)

    def _load(self, peer: str, metadata: bytes) -> None:
        with self.calling(f"does not take the metadata of {peer!r}") as nixl:
            if (name := _text(nixl.add_remote_agent(metadata))) != peer:  # another peer here may have that name
                raise TransferError(f"the metadata in the card of {peer!r} is of the agent {quoted(name)}")
            self._metadata.setdefault(peer, {})[metadata] = None

    def _remove(self, peer: str) -> None:
        self._metadata.pop(peer, None)
        if peer not in self._others:
            error_of(lambda: self.nixl.remove_remote_agent(peer))  # NIXL may have removed it already


@dataclass
class _Write:
    """A write as NIXL has it, and the error of its post, if any: then it is not known whether its bytes move."""

    handle: Any
    error: Exception | None = None


class NixlWire:
    """The wire to one peer by NIXL: large writes, each with a note that comes behind its bytes, and notes in order.

    No method blocks, but a write over shared memory is copied while it is posted; the interpreter is free meanwhile.
    Every method may raise KVPlanError.

    Args:
        end: this process's end of NIXL, which has the ring.
        peer: name of the peer.

    Attributes:
        peer: name of the peer.
        gone: whether NIXL has reported that the peer is gone.
    """

    gone = False

    def __init__(self, end: NixlEnd, peer: str) -> None:
        self.peer = peer
        self._end, self._theirs = end, ("DRAM", 0)
        end.hold(peer)

    def metadata(self) -> bytes:
        """Return what the peer needs to write to this process's ring."""
        return self._end.ring_metadata()

    def join(self, metadata: bytes, place: Place) -> None:
        """Take the peer's metadata, and the place of its ring."""
        self._end.add(self.peer, metadata)
        self._theirs = memory_of(place.device, f"the ring of {self.peer!r}")

    def renew(self) -> None:
        """Connect anew to a peer that NIXL has lost."""
        self._end.renew(self.peer)

    def send(self, note: bytes) -> None:
        """Send a note."""
        with self._calling("reach") as nixl:
            nixl.send_notif(self.peer, note)

    def write(self, local: int, remote: int, nbytes: int, note: bytes) -> Any:
        """Return one write, for :meth:`post`."""
        with self._calling("write to") as nixl:
            places = (local, *self._end.ring), (remote, *self._theirs)
            sides = [
                nixl.get_xfer_descs(np.array([(start, nbytes, number)], np.int64), memory)
                for start, memory, number in places
            ]
            return _Write(nixl.initialize_xfer("WRITE", *sides, self.peer, note))

    def post(self, write: _Write) -> None:
        """Begin a write, which must be looked after from now on, also after Ctrl-C; :meth:`over` raises its error."""
        try:
            with self._calling("write to") as nixl:
                nixl.transfer(write.handle)
        except Exception as error:
            write.error = error
        except BaseException:
            write.error = TransferError(f"the write to {self.peer!r} was interrupted while it was posted")
            raise

    def over(self, write: _Write) -> bool:
        """Return whether a write has ended; raise an error if it failed."""
        with self._calling("write to") as nixl:
            if write.error is not None:
                raise write.error
            state = nixl.check_xfer_state(write.handle)
            if state == DONE:
                self._end.release(write.handle)
            elif state != MOVING:
                raise TransferError(f"NIXL cannot write to {self.peer!r}: {state}")
            return bool(state == DONE)

    def release(self, write: _Write) -> bool:
        """Forget a write that has not ended well; return False if NIXL has begun to abort it, and ask again."""
        with self._end.lock:
            return error_of(write.handle.release) is None

    def close(self) -> None:
        """Forget the peer; nothing moves any more."""
        self._end.drop(self.peer)

    @contextmanager
    def _calling(self, what: str) -> Iterator[Any]:
        try:
            with self._end.calling(f"cannot {what} {self.peer!r}") as nixl:
                yield nixl
        except TransferError as error:
            self.gone |= "DISCONNECT" in str(error)
            raise


def _text(name: bytes | str) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


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
