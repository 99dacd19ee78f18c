"""The wire to one peer, as packed transfers use it: large writes, each with a note, notes by themselves, and its pace.

Chunks that come faster than a CPU thread moves them are moved by hardware.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

MOVING, DONE, FAILED = "moving", "done", "failed"  # the states of a write
FAST = 10e9  # bytes a second: sockets, and copies of GPU memory by the CPU, stay below 3e9
LEAST_CHUNKS, CHUNKS = 4, 16  # chunks that have to come so fast: some of the latest


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


class Pace:
    """Whether hardware moves the bytes from one end to another, by the time that chunks take.

    The bytes of the latest chunks have all moved since the first of them could begin. So their number over this time is
    at most the speed of the wire, however many chunks moved at once, and however late a process has looked. A wire that
    was fast once stays so, since the wire to a peer does not change.

    Args:
        now: clock, in seconds.

    Attributes:
        fast: whether so many chunks came so fast.

    >>> time = 0.0
    >>> pace = Pace(lambda: time)
    >>> for _ in range(4):
    ...     begun = pace.begin()
    ...     time += 1e-3
    ...     pace.end(begun, 1 << 20)
    >>> pace.fast
    False
    >>> for _ in range(4):
    ...     begun = pace.begin()
    ...     time += 1e-3
    ...     pace.end(begun, 32 << 20)
    >>> pace.fast
    True
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.fast = False
        self._now = now
        self._latest: deque[tuple[float, int]] = deque(maxlen=CHUNKS)  # of each, the latest first: its begin and bytes

    def begin(self) -> float:
        """Return the time at which a chunk may begin to move, for :meth:`end`; any number once the wire is fast."""
        return 0.0 if self.fast else self._now()

    def end(self, begun: float, nbytes: int) -> None:
        """Note that a chunk has come."""
        if self.fast:
            return
        self._latest.appendleft((begun, nbytes))
        since = now = self._now()
        moved = 0
        for count, (begin, some) in enumerate(self._latest, 1):
            moved += some
            if begin < since:  # noqa: PLR1730  # a call of min() would cost more than all else
                since = begin
            if count >= LEAST_CHUNKS and moved > FAST * (now - since):
                self.fast = True
                return
