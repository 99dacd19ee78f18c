"""NIXL as a wire for packed transfers: a registered ring, writes that are posted again and again, and notes."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvplan.errors import TransferError
from kvplan.nixl.nixl_connection import End, in_words
from kvplan.plan.nixl_lists import memory_of

KEPT_WRITES = 1024  # most prepared writes that wait to be posted again

MOVING, DONE = "moving", "done"

log = logging.getLogger("kvplan.nixl")
_FIRST = np.zeros(1, dtype=np.int32)


class NixlRing:
    """Memory that is registered with NIXL, so that peers can write there.

    Args:
        end: this process's end of NIXL.
        address, nbytes: the memory.
        device: ``"cpu"``, or a GPU such as ``"cuda:0"``.

    Raises:
        PathError: the memory is neither the CPU's nor CUDA's.
        TransferError: NIXL cannot register it.
    """

    def __init__(self, end: End, address: int, nbytes: int, device: str) -> None:
        self.address, self.nbytes, self.device = address, nbytes, device
        self._end = end
        memory, number = memory_of(device, "the ring")
        with end.lock:
            end.check_open()
            try:
                self._registered: Any = end.nixl.register_memory(
                    np.array([(address, nbytes, number)], np.int64), memory
                )
            except Exception as error:
                raise TransferError(f"NIXL cannot register the ring of {end.name!r}: {in_words(error)}") from error

    def metadata(self) -> bytes:
        """Return NIXL's metadata of this process that a peer needs to write to the ring and to send notes.

        Raises:
            TransferError: NIXL gives no metadata, or the agent is closed.
        """
        end = self._end
        with end.lock:
            end.check_open()
            try:
                backends = list(end.nixl.backends)
                made = end.nixl.get_partial_agent_metadata(self._registered, inc_conn_info=True, backends=backends)
                return bytes(made)
            except Exception as error:
                raise TransferError(f"NIXL gives no metadata of {end.name!r}: {in_words(error)}") from error

    def close(self) -> None:
        """Deregister the memory. No write may move any more."""
        with self._end.lock:
            registered, self._registered = self._registered, None
            if registered is not None:
                try:
                    self._end.nixl.deregister_memory(registered)
                except Exception as error:  # noqa: BLE001  # the caller frees its memory anyway
                    log.warning("NIXL keeps the ring of %s registered: %s", self._end.name, in_words(error))


class _Prepared(NamedTuple):
    """One write that NIXL has prepared; it can be posted again after each end.

    Attributes:
        key: address here, address there, and bytes.
        held: NIXL's handles: the write's, and those of its two lists.
    """

    key: tuple[int, int, int]
    held: tuple[Any, Any, Any]


class Write:
    """A posted write.

    Attributes:
        prepared: NIXL's handles; None once they are kept for the next write, or released.
        state: ``"moving"``, ``"done"`` or ``"failed: why"``.
    """

    __slots__ = ("prepared", "state")

    def __init__(self, prepared: _Prepared | None, state: str) -> None:
        self.prepared, self.state = prepared, state


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

    def __init__(self, end: End, peer: str, device: str, lost: Callable[[str], object] | None = None) -> None:
        self.peer = peer
        self._end = end
        self._lost = lost
        self._mine = memory_of(device, "the ring")
        self._theirs = self._mine
        self._idle: OrderedDict[tuple[int, int, int], list[_Prepared]] = OrderedDict()
        self._idle_count = 0

    def ring(self, address: int, nbytes: int, device: str) -> None:
        """Take the place of the peer's ring; see :meth:`kvplan.agents.packed.line.Wire.ring`."""
        self._theirs = memory_of(device, f"the ring of {self.peer!r}")
        with self._end.lock:
            try:
                whole = self._list(self.peer, address, nbytes, *self._theirs)
            except Exception as error:
                raise TransferError(f"NIXL cannot reach the ring of {self.peer!r}: {in_words(error)}") from error
            self._free((whole,))

    def write(self, local: int, remote: int, nbytes: int, note: bytes) -> Write:
        """Post one write; see :meth:`kvplan.agents.packed.line.Wire.write`."""
        end = self._end
        with end.lock:
            end.check_open()
            prepared = self._prepared((local, remote, nbytes))
            try:
                state = end.nixl.transfer(prepared.held[0], note)
            except Exception as error:  # noqa: BLE001  # whether its bytes move is not known
                self._failed(error)
                return Write(prepared, f"failed: {in_words(error)}")
            made = Write(prepared, MOVING)
            self._take(made, state)
            return made

    def state(self, handle: Write) -> str:
        """Return the state of a write; see :meth:`kvplan.agents.packed.line.Wire.state`."""
        if handle.state is MOVING and handle.prepared is not None:
            with self._end.lock:
                try:
                    state = self._end.nixl.check_xfer_state(handle.prepared.held[0])
                except Exception as error:  # noqa: BLE001
                    self._failed(error)
                    handle.state = f"failed: {in_words(error)}"
                else:
                    self._take(handle, state)
        return handle.state

    def release(self, handle: Write) -> bool:
        """Forget a write; see :meth:`kvplan.agents.packed.line.Wire.release`."""
        with self._end.lock:
            prepared = handle.prepared
            if prepared is not None:
                try:
                    prepared.held[0].release()
                except Exception as error:  # noqa: BLE001  # it is in use; NIXL has begun to abort it
                    log.debug("NIXL cannot release a write to %s yet: %s", self.peer, in_words(error))
                    return False
                handle.prepared = None
                self._free(prepared.held[1:])
            if handle.state is MOVING:
                handle.state = "failed: it was given up"
        return True

    def send(self, note: bytes) -> None:
        """Send a note; raise TransferError if NIXL does not."""
        with self._end.lock:
            self._end.check_open()
            try:
                self._end.nixl.send_notif(self.peer, note)
            except Exception as error:
                self._failed(error)
                raise TransferError(f"NIXL does not send the note to {self.peer!r}: {in_words(error)}") from error

    def close(self) -> None:
        """Release the writes that wait to be posted again."""
        with self._end.lock:
            idle, self._idle, self._idle_count = self._idle, OrderedDict(), 0
            for kept in idle.values():
                for prepared in kept:
                    self._free(prepared.held)

    def _prepared(self, key: tuple[int, int, int]) -> _Prepared:
        """Return a write that is ready to be posted; raise TransferError if NIXL cannot prepare it."""
        kept = self._idle.get(key)
        if kept:
            self._idle_count -= 1
            self._idle.move_to_end(key)
            return kept.pop()
        local, remote, nbytes = key
        held: list[Any] = []
        try:
            held.append(self._list("NIXL_INIT_AGENT", local, nbytes, *self._mine))
            held.append(self._list(self.peer, remote, nbytes, *self._theirs))
            made = self._end.nixl.make_prepped_xfer("WRITE", held[0], _FIRST, held[1], _FIRST, b"")
        except Exception as error:
            self._free(tuple(held))
            self._failed(error)
            raise TransferError(f"NIXL cannot write to {self.peer!r}: {in_words(error)}") from error
        return _Prepared(key, (made, *held))

    def _list(self, whose: str, address: int, nbytes: int, memory: str, number: int) -> Any:
        return self._end.nixl.prep_xfer_dlist(whose, np.array([(address, nbytes, number)], dtype=np.int64), memory)

    def _take(self, write: Write, state: str) -> None:
        if state == "DONE":
            prepared, write.prepared, write.state = write.prepared, None, DONE
            if prepared is not None:
                self._keep(prepared)
        elif state != "PROC":
            write.state = f"failed: NIXL reports the state {state}"

    def _keep(self, prepared: _Prepared) -> None:
        """Keep a write that has ended, to post it again; drop the least recently used ones beyond a bound."""
        self._idle.setdefault(prepared.key, []).append(prepared)
        self._idle_count += 1
        while self._idle_count > KEPT_WRITES:
            key, kept = next(iter(self._idle.items()))
            if kept:
                self._idle_count -= 1
                self._free(kept.pop().held)
            if not kept:
                del self._idle[key]

    def _free(self, handles: tuple[Any, ...]) -> None:
        for handle in handles:
            try:
                handle.release()
            except Exception as error:  # noqa: BLE001  # NIXL's own finalizer tries again
                log.debug("NIXL cannot release %r: %s", handle, in_words(error))

    def _failed(self, error: BaseException) -> None:
        if "DISCONNECT" in str(error) and self._lost is not None:
            self._lost(f"NIXL reports that it is gone ({in_words(error)})")
