"""NIXL as a wire for packed transfers: a registered ring, writes that are posted again and again, and notes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from kvplan.agents.by_nixl.nixl_end import PACKED, NixlEnd, in_words
from kvplan.errors import KVPlanError, TransferError
from kvplan.plan.nixl_lists import memory_of

KEPT_WRITES = 1024  # most prepared writes that wait to be posted again; then all are released

MOVING, DONE = "moving", "done"

log = logging.getLogger("kvplan.agents")
_FIRST = np.zeros(1, dtype=np.int32)


class Write:
    """One write that NIXL has prepared; it is posted again after each end.

    Attributes:
        key: address here, address there, and bytes.
        handles: NIXL's: the write's, and those of its two lists; none once they are released.
        state: ``"moving"``, ``"done"`` or ``"failed: why"``.
    """

    __slots__ = ("handles", "key", "state")

    def __init__(self, key: tuple[int, int, int], handles: list[Any]) -> None:
        self.key, self.handles, self.state = key, handles, MOVING


class NixlWire:
    """The wire to one peer by NIXL; see :class:`kvplan.agents.packed.line.Wire`.

    The peer's metadata must have been added to NIXL. A write over shared memory is copied while it is posted; the
    interpreter is free meanwhile.

    Args:
        end: this process's end of NIXL.
        peer: name of the peer.
        device: the device of this process's ring.
        lost: function that is called with the reason when NIXL reports that the peer is gone.

    Attributes:
        peer: name of the peer.
    """

    def __init__(self, end: NixlEnd, peer: str, device: str, lost: Callable[[str], object]) -> None:
        self.peer = peer
        self._end = end
        self._lost = lost
        self._mine = memory_of(device, "the ring")
        self._theirs = self._mine
        self._idle: dict[tuple[int, int, int], list[Write]] = {}  # those that have ended, to be posted again
        self._kept = 0  # how many

    def ring(self, address: int, nbytes: int, device: str) -> None:
        """Take the place of the peer's ring; see :meth:`kvplan.agents.packed.line.Wire.ring`."""
        self._theirs = memory_of(device, f"the ring of {self.peer!r}")
        with self._end.lock:
            try:
                whole = self._list(self.peer, address, nbytes, *self._theirs)
            except Exception as error:
                raise TransferError(f"NIXL cannot reach the ring of {self.peer!r}: {in_words(error)}") from error
            self._free([whole])

    def write(self, local: int, remote: int, nbytes: int, note: bytes) -> Write:
        """Post one write; see :meth:`kvplan.agents.packed.line.Wire.write`."""
        end = self._end
        with end.lock:
            end.check_open()
            key = local, remote, nbytes
            if self._idle.get(key):
                self._kept -= 1
                write = self._idle[key].pop()
                write.state = MOVING
            else:
                write = self._prepared(key)
            self._ask(write, lambda: end.nixl.transfer(write.handles[0], note))
            return write

    def state(self, handle: Write) -> str:
        """Return the state of a write; see :meth:`kvplan.agents.packed.line.Wire.state`."""
        if handle.state is MOVING:
            with self._end.lock:
                self._ask(handle, lambda: self._end.nixl.check_xfer_state(handle.handles[0]))
        return handle.state

    def release(self, handle: Write) -> bool:
        """Forget a write; see :meth:`kvplan.agents.packed.line.Wire.release`."""
        with self._end.lock:
            if handle.state is not DONE and handle.handles:
                try:
                    handle.handles[0].release()
                except Exception as error:  # noqa: BLE001  # it is in use; NIXL has begun to abort it
                    log.debug("NIXL cannot release a write to %s yet: %s", self.peer, in_words(error))
                    return False
                self._free(handle.handles[1:])
                handle.handles, handle.state = [], "failed: it was given up"
        return True

    def send(self, note: bytes) -> None:
        """Send a note; raise TransferError if NIXL does not."""
        try:
            self._end.tell(self.peer, note)
        except TransferError as error:
            self._failed(error)
            raise

    def close(self) -> None:
        """Release the writes that wait to be posted again."""
        with self._end.lock:
            for write in [one for some in self._idle.values() for one in some]:
                self._free(write.handles)
            self._idle.clear()
            self._kept = 0

    def _prepared(self, key: tuple[int, int, int]) -> Write:
        """Return a write that is ready to be posted; raise TransferError if NIXL cannot prepare it."""
        local, remote, nbytes = key
        handles: list[Any] = []
        try:
            handles.append(self._list("NIXL_INIT_AGENT", local, nbytes, *self._mine))
            handles.append(self._list(self.peer, remote, nbytes, *self._theirs))
            handles.insert(0, self._end.nixl.make_prepped_xfer("WRITE", handles[0], _FIRST, handles[1], _FIRST, b""))
        except Exception as error:
            self._free(handles)
            self._failed(error)
            raise TransferError(f"NIXL cannot write to {self.peer!r}: {in_words(error)}") from error
        return Write(key, handles)

    def _list(self, whose: str, address: int, nbytes: int, memory: str, number: int) -> Any:
        return self._end.nixl.prep_xfer_dlist(whose, np.array([(address, nbytes, number)], dtype=np.int64), memory)

    def _ask(self, write: Write, call: Callable[[], str]) -> None:
        """Take the state of a write that a call of NIXL returns; keep a write that has ended, to post it again."""
        try:
            state = call()
        except Exception as error:  # noqa: BLE001  # whether its bytes move is not known
            self._failed(error)
            write.state = f"failed: {in_words(error)}"
            return
        if state == "DONE":
            write.state = DONE
            if self._kept >= KEPT_WRITES:
                self.close()
            self._kept += 1
            self._idle.setdefault(write.key, []).append(write)
        elif state != "PROC":
            write.state = f"failed: NIXL reports the state {state}"

    def _free(self, handles: list[Any]) -> None:
        for handle in handles:
            try:
                handle.release()
            except Exception as error:  # noqa: BLE001  # NIXL's own finalizer tries again
                log.debug("NIXL cannot release %r: %s", handle, in_words(error))

    def _failed(self, error: BaseException) -> None:
        if "DISCONNECT" in str(error):
            self._lost(f"NIXL reports that it is gone ({in_words(error)})")


class NixlReach:
    """The ring of this process as peers reach it by NIXL; see :class:`kvplan.agents.packed.end.Reach`.

    Args:
        nixl: this process's end of NIXL.
        address, nbytes: the memory of the ring, which is registered.
        device: ``"cpu"``, or a GPU such as ``"cuda:0"``.

    Raises:
        PathError: the memory is neither the CPU's nor CUDA's.
        TransferError: NIXL cannot register it.
    """

    def __init__(self, nixl: NixlEnd, address: int, nbytes: int, device: str) -> None:
        self._nixl, self._device = nixl, device
        self._broken: set[str] = set()  # peers whose connection is renewed before they are greeted again
        memory, number = memory_of(device, "the ring")
        with nixl.lock:
            nixl.check_open()
            try:
                rows = np.array([(address, nbytes, number)], np.int64)
                self._registered: Any = nixl.nixl.register_memory(rows, memory)
            except Exception as error:
                raise TransferError(f"NIXL cannot register the ring of {nixl.name!r}: {in_words(error)}") from error

    def metadata(self) -> bytes:
        """Return NIXL's metadata of this process that a peer needs to write to the ring and to send notes.

        Raises:
            TransferError: NIXL gives no metadata, or the agent is closed.
        """
        end = self._nixl
        with end.lock:
            end.check_open()
            try:
                backends = list(end.nixl.backends)
                made = end.nixl.get_partial_agent_metadata(self._registered, inc_conn_info=True, backends=backends)
                return bytes(made)
            except Exception as error:
                raise TransferError(f"NIXL gives no metadata of {end.name!r}: {in_words(error)}") from error

    def join(self, peer: str, metadata: bytes) -> None:
        """See :class:`kvplan.agents.packed.end.Reach`; a peer that has restarted replaces the one that was known."""
        try:
            self._nixl.add(peer, metadata, PACKED)
        except KVPlanError:
            self._nixl.replace(peer, metadata, PACKED)
            self._broken.discard(peer)

    def wire(self, peer: str, lost: Callable[[str], object]) -> NixlWire:
        """See :class:`kvplan.agents.packed.end.Reach`."""
        if peer in self._broken:
            self.renew(peer)
            self._broken.discard(peer)
        self._nixl.hold(peer, PACKED)

        def gone(why: str) -> None:
            self._broken.add(peer)
            lost(why)

        return NixlWire(self._nixl, peer, self._device, gone)

    def renew(self, peer: str) -> None:
        """See :class:`kvplan.agents.packed.end.Reach`."""
        self._nixl.renew(peer)

    def tell(self, peer: str, note: bytes) -> None:
        """See :class:`kvplan.agents.packed.end.Reach`."""
        self._nixl.tell(peer, note)

    def leave(self, peer: str) -> None:
        """See :class:`kvplan.agents.packed.end.Reach`."""
        self._nixl.drop(peer, PACKED)

    def lost(self, peer: str) -> bool:
        """Return whether NIXL has reported a peer as gone, and it was not greeted since."""
        return peer in self._broken

    def close(self) -> None:
        """Deregister the ring. No write may move any more."""
        with self._nixl.lock:
            try:
                self._nixl.nixl.deregister_memory(self._registered)
            except Exception as error:  # noqa: BLE001  # the caller frees its memory anyway
                log.warning("NIXL keeps the ring of %s registered: %s", self._nixl.name, in_words(error))
