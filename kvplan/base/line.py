"""A queue of submitted entries that can be closed, without a lock."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Closed:
    """Marks in a line where it was closed; entries behind the mark were never submitted."""


CLOSED = Closed()


class Line(Generic[Entry]):
    """Entries that any thread appends, and that one thread at a time takes from the front.

    Attributes:
        closed: whether it takes no more entries.
        line: the entries, and :data:`CLOSED` behind the last one.

    One C call submits an entry: before it the entry is not in the line, and after it every thread sees it. So nothing
    has to be undone if a signal's handler or a finalizer interrupts a submit. And a submit inside another one, in the
    same thread, finds nothing half made.

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
        """Submit an entry, then wake the thread that takes it, whatever a signal's handler raises meanwhile."""
        try:
            self.line.append(entry)
        finally:
            wake()

    def close(self, wake: Callable[[], object]) -> None:
        """Take no more entries. Closing twice is fine."""
        try:
            self.closed = True  # before the mark is in the line: a submit behind it checks this
            self.line.append(CLOSED)
        finally:
            wake()

    def withdraws(self, entry: Entry) -> bool:
        """Remove an appended entry if it is behind the mark, where no thread would take it; return whether it was."""
        if not self.closed:
            return False
        line = list(self.line)  # one C call, because other threads append meanwhile
        if CLOSED not in line or entry not in line[line.index(CLOSED) :]:
            return False
        with contextlib.suppress(ValueError):
            self.line.remove(entry)
        return True

    def entries(self) -> list[Entry]:
        """All submitted entries that have not been taken."""
        found: list[Entry] = []
        for one in list(self.line):
            if isinstance(one, Closed):
                break
            found.append(one)
        return found

    def first(self) -> Entry | None:
        """The next entry, or None."""
        one = self.line[0] if self.line else None
        return None if isinstance(one, Closed) else one

    def ended(self) -> bool:
        """Whether it is closed and all its entries were taken."""
        return bool(self.line) and self.line[0] is CLOSED

    def take(self) -> None:
        """Remove the first entry; only for the thread that takes them."""
        self.line.popleft()

    def __len__(self) -> int:
        return len(self.entries()) if self.closed else len(self.line)
