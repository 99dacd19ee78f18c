"""The threads that copy for the host path."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

Task = Callable[[], None]


class Crew:
    """The threads that copy: the thread that calls ``run``, and helpers, which start with their first tasks.

    An executor of concurrent.futures cannot be used: it accepts no work after the interpreter begins to exit.

    Args:
        helpers: number of helpers.
        inside: identifiers of threads that must not wait for the executor's end; each helper adds its own.
    """

    def __init__(self, helpers: int, inside: set[int]) -> None:
        self._missing = helpers
        self._inside = inside
        self._helpers: list[threading.Thread] = []
        self._calls: queue.SimpleQueue[_Share | None] = queue.SimpleQueue()

    def run(self, work: list[Task]) -> None:
        """Run all tasks, wait until all have ended, and raise the first error."""
        share = _Share(work)
        wanted = len(work) - 1
        while self._missing and len(self._helpers) < wanted:
            helper = threading.Thread(target=_help, args=(self._calls, self._inside), name="kvplan-copy", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # no more threads: the limit of the system, or an interpreter that exits
                break
            self._missing -= 1
            self._helpers.append(helper)
        for _ in self._helpers[:wanted]:
            self._calls.put(share)
        share.work()
        share.wait()

    def dismiss(self) -> None:
        """End the helpers, and wait until they have ended."""
        for _ in self._helpers:
            self._calls.put(None)
        for helper in self._helpers:
            helper.join()


class _Share:
    """Tasks that several threads take one by one."""

    def __init__(self, work: list[Task]) -> None:
        self._count = len(work)
        self._left = deque(work)
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work(self) -> None:
        """Take tasks and run them until no task is left."""
        while True:
            try:
                task = self._left.popleft()
            except IndexError:
                return
            try:
                task()
            except BaseException as error:  # noqa: BLE001  # wait() raises it in the runner's thread
                self._ended.put(error)
            else:
                self._ended.put(None)

    def wait(self) -> None:
        """Wait until every task has ended; raise the first error."""
        errors = [error for error in (self._ended.get() for _ in range(self._count)) if error is not None]
        if errors:
            raise errors[0]


def _help(calls: queue.SimpleQueue[_Share | None], inside: set[int]) -> None:
    me = threading.get_ident()
    inside.add(me)
    while (share := calls.get()) is not None:
        share.work()
        del share
    inside.discard(me)  # a later thread may get this identifier
