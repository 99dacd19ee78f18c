"""The wire to one peer, as packed transfers use it: large writes, each with a note, and notes by themselves."""

from __future__ import annotations

from typing import Any, Protocol

MOVING, DONE, FAILED = "moving", "done", "failed"  # the states of a write


class Wire(Protocol):
    """The wire from this process to one peer. NIXL's is one; the simulated wire of the tests is another.

    One thread at a time calls the methods, and none may block. A wire may deliver notes late, twice, and in another
    order than they were sent. It loses no note of a write that is done, and no note that :meth:`send` has taken. The
    notes that arrive here are given to :meth:`kvplan.agents.packed.pack_end.End.take` by the owner of the end.

    Attributes:
        most_note: most bytes of a note.
    """

    most_note: int

    def ring(self, address: int, nbytes: int, device: str) -> None:
        """Take the place of the peer's ring, which later writes go to.

        Args:
            address: address of the first byte, in the peer's process.
            nbytes: bytes of the whole ring.
            device: ``"cpu"``, or a GPU such as ``"cuda:0"``, as the peer numbers it.

        Raises:
            KVPlanError: this wire cannot write there.
        """

    def write(self, local: int, remote: int, nbytes: int, note: bytes) -> Any:
        """Post one write, and return its handle.

        The note reaches the peer after the bytes do. Its content is complete when the call returns; ``local`` must keep
        its bytes until the write has ended.

        Args:
            local: address of the bytes, in this process's ring.
            remote: address in the peer's ring.
            nbytes: bytes to move, at least 1.
            note: at most :attr:`most_note` bytes.

        Raises:
            KVPlanError: the write was not posted: neither its bytes nor its note arrive.
        """

    def state(self, handle: Any) -> str:
        """Return ``"moving"``, ``"done"``, or ``"failed: why"``.

        After ``"done"`` the bytes are in the peer's memory. After ``"failed"`` any part of them may be, and the note
        arrives at most if all of them are.
        """

    def release(self, handle: Any) -> bool:
        """Forget a write, and end it if it moves.

        Returns:
            True if the write has ended: it reads and writes no memory any more. Its note may still arrive, if all its
            bytes did. False if it still moves; the caller asks again later.
        """

    def send(self, note: bytes) -> None:
        """Send a note without bytes.

        Raises:
            KVPlanError: the note was not sent. The caller tries it again.
        """

    def close(self) -> None:
        """Forget the peer: nothing moves any more, and nothing is sent again. It may be called twice."""
