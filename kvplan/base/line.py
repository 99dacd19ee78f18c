"""A queue of submitted entries that can be closed, without a lock."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Closed:
    """A mark in a line: entries behind it came after the line was closed, and were never submitted."""


CLOSED = Closed()


class Line(Generic[Entry]):
    """A queue. Any thread appends entries, and one thread at a time takes them from the front.

    Attributes:
        closed: whether it accepts no more entries.
        line: the entries, and :data:`CLOSED` behind the last entry.

    One C call submits an entry: before it the entry is not in the line, and after it every thread sees it. So a submit
    that a signal handler or a finalizer interrupts needs no undo. And a submit inside another submit, in the same
    thread, finds a complete line.

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
        """Submit an entry, then wake the thread that takes it, even if a signal handler raises an error."""
        try:
            self.line.append(entry)
        finally:
            wake()

    def close(self, wake: Callable[[], object]) -> None:
        """Accept no more entries. It may be called twice."""
        try:
            self.closed = True  # set before the mark is in the line: a submit behind the mark checks it
            self.line.append(CLOSED)
        finally:
            wake()

    def withdraws(self, entry: Entry) -> bool:
        """Remove an entry if it is behind the mark, where no thread would take it; return whether it was there."""
        if not self.closed:
            return False
        line = list(self.line)  # one C call, because other threads append meanwhile
        if CLOSED not in line or entry not in line[line.index(CLOSED) :]:
            return False
        with contextlib.suppress(ValueError):
            self.line.remove(entry)
        return True

    def entries(self) -> list[Entry]:
        """Return all submitted entries that have not been taken."""
        found: list[Entry] = []
        for one in list(self.line):
            if isinstance(one, Closed):
                break
            found.append(one)
        return found

    def first(self) -> Entry | None:
        """Return the next entry, or None."""
        one = self.line[0] if self.line else None
        return None if isinstance(one, Closed) else one

    def ended(self) -> bool:
        """Return whether it is closed and all its entries were taken."""
        return bool(self.line) and self.line[0] is CLOSED

    def take(self) -> None:
        """Remove the first entry; only the thread that takes entries may call it."""
        self.line.popleft()

    def __len__(self) -> int:
        return len(self.entries()) if self.closed else len(self.line)
