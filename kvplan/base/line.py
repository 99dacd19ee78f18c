"""What was submitted, in the order of the submits, up to where the line was closed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Closed:
    """Stands in a line where it was closed; what is behind it was never submitted."""


CLOSED = Closed()


class Line(Generic[Entry]):
    """Entries that any thread appends, and that one thread at a time takes from the front.

    Attributes:
        closed: whether it takes no more.
        line: the entries, and :data:`CLOSED` behind the last.

    An entry is submitted by one call of C: from then on it is in the line, for everybody, and before that it is not.
    So nothing has to be undone where a signal's handler, or a finalizer, comes between two bytecodes of a submit;
    and a submit within another, of the same thread, finds nothing half made. There is no lock.

    >>> line = Line()
    >>> line.append("a", lambda: None), line.close(lambda: None), line.append("b", lambda: None)
    (None, None, None)
    >>> line.entries(), line.withdraws("a"), line.withdraws("b"), line.first()
    (['a'], False, True, 'a')
    """

    __slots__ = ("closed", "line")

    def __init__(self) -> None:
        self.line: deque[Entry | Closed] = deque()
        self.closed = False

    def append(self, entry: Entry, wake: Callable[[], object]) -> None:
        """Submit an entry, then wake whoever takes it; a call of C, so that it is made whatever is raised meanwhile."""
        try:
            self.line.append(entry)
        finally:
            wake()

    def close(self, wake: Callable[[], object]) -> None:
        """Take no more. Closing twice is fine."""
        try:
            self.closed = True  # before the end is in the line: who is behind it looks
            self.line.append(CLOSED)
        finally:
            wake()

    def withdraws(self, entry: Entry) -> bool:
        """Whether an entry that was appended is behind the end, so that nobody takes it; then it is removed."""
        if not self.closed:
            return False
        line = list(self.line)  # by one call: others append meanwhile
        if CLOSED not in line or entry not in line[line.index(CLOSED) :]:
            return False
        with contextlib.suppress(ValueError):
            self.line.remove(entry)
        return True

    def entries(self) -> list[Entry]:
        """All that are submitted and have not been taken."""
        found: list[Entry] = []
        for one in list(self.line):
            if isinstance(one, Closed):
                break
            found.append(one)
        return found

    def first(self) -> Entry | None:
        """The entry whose turn it is."""
        one = self.line[0] if self.line else None
        return None if isinstance(one, Closed) else one

    def ended(self) -> bool:
        """Whether it is closed and all entries before that were taken."""
        return bool(self.line) and self.line[0] is CLOSED

    def take(self) -> None:
        """Remove the first entry; only by the thread whose line it is."""
        self.line.popleft()

    def __len__(self) -> int:
        return len(self.entries()) if self.closed else len(self.line)
