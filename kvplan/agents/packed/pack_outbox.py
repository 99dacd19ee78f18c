"""The messages to one peer, and the slots that they give back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvplan.agents.packed.pack_messages import BYE, CREDIT, HELLO, MOST_CREDITS, Credit, message, overhead
from kvplan.agents.packed.wire import Wire

PAUSE_SECONDS = 0.01  # before a message that was not sent is tried again; the pause doubles
SENDS = 8  # attempts to send a message, before the peer counts as lost


class Outbox:
    """Sends messages in order, as far as the wire takes them, once the peer has heard this end's greeting.

    Args:
        wire: the wire to the peer.
        mine: number of this end.
        enough: number of slots that are given back together, if no other message takes them.
        now: clock, in seconds.

    Attributes:
        mine: as given; a restart changes it.
        enough: as given; it changes with the number of granted slots.
        theirs: number of the peer's end; 0 while it is not known.
        ready: whether the peer has heard this end's greeting.
        dead: whether the peer is gone, so that nothing is sent.
        lost: why the peer counts as lost, since the wire took no message; None while it does.
        sent: number of messages sent, without those that travel with a write.
    """

    def __init__(self, wire: Wire, mine: int, enough: int, now: Callable[[], float]) -> None:
        self.mine, self.theirs = mine, 0
        self.ready = self.dead = False
        self.lost: str | None = None
        self.sent = 0
        self.enough = enough
        self._wire, self._now = wire, now
        self._waiting: deque[tuple[int, bytes, int]] = deque()  # kind, body, and number of the end that it is for, or 0
        self._owed: list[Credit] = []
        self._missed = 0  # attempts for the first message
        self._again_at = 0.0

    @property
    def waits(self) -> bool:
        """Whether messages wait to be sent."""
        return bool(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether messages wait to be sent, or enough slots to be given back."""
        return bool(self._waiting) or len(self._owed) >= self.enough

    @property
    def owed(self) -> int:
        """Number of slots that no message has given back yet."""
        return len(self._owed)

    def owe(self, given: Sequence[Credit]) -> None:
        """Give slots back with a later message."""
        self._owed += given

    def say(self, kind: int, body: bytes = b"", to: int = 0) -> None:
        """Send a message, now or later; ``to`` an earlier end of the peer, by its number."""
        if not self.dead:
            self._waiting.append((kind, body, to))
            if len(self._waiting) == 1:
                self.flush()

    def note(self, kind: int, body: bytes, to: int = 0) -> tuple[bytes, Sequence[Credit]]:
        """Return the note of a message, and the slots that it gives back: those for which it has room."""
        if not self._owed or not self.ready or kind in (HELLO, BYE):  # late ones of these give nothing back
            return message(kind, self.mine, to or self.theirs, (), body), ()
        room = (self._wire.most_note - overhead(0) - len(body)) // (overhead(1) - overhead(0))
        count = max(0, min(room, MOST_CREDITS))
        ride, self._owed = self._owed[:count], self._owed[count:]
        return message(kind, self.mine, self.theirs, ride, body), ride

    def flush(self) -> None:
        """Send what can be sent."""
        if len(self._owed) >= self.enough and self.ready and not self._waiting:
            self._waiting.append((CREDIT, b"", 0))
        if not self._waiting or (self._missed and self._now() < self._again_at):
            return
        while self._waiting:
            kind, body, to = self._waiting[0]
            if not self.ready and kind not in (HELLO, BYE):
                return
            if kind != CREDIT or self._owed:
                note, ride = self.note(kind, body, to)
                try:
                    self._wire.send(note)
                except Exception as error:  # noqa: BLE001  # it is tried again
                    self._miss(ride, error)
                    return
                self.sent += 1
            self._missed = 0
            self._waiting.popleft()

    def _miss(self, ride: Sequence[Credit], error: Exception) -> None:
        self.owe(ride)
        self._missed += 1
        self._again_at = self._now() + PAUSE_SECONDS * 2**self._missed
        if self._missed >= SENDS:
            self.lost = f"the wire did not take a message in {SENDS} attempts: {error}"

    def greet(self, body: bytes) -> None:
        """Send a greeting before all other messages."""
        self._waiting.appendleft((HELLO, body, 0))
        self.flush()

    def drop_unready(self) -> None:
        """Forget messages that wait for a peer that has not heard this end's greeting."""
        if not self.ready:
            self._waiting.clear()

    def reset(self) -> None:
        """Forget all messages and all slots that would be given back: one of the two ends begins anew."""
        self.ready = False
        self._waiting.clear()
        self._owed.clear()
        self._missed = 0
