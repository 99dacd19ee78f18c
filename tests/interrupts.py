"""KeyboardInterrupt at every point of a call where Python may run a signal's handler, one after another.

Python looks at signals after calls, on entry of functions and at jumps back. A profiler is told of the first two: it
raises there, in the main thread, what a handler would. What it does on top, at the returns of Python's functions, no
signal could; nothing may break by that either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

OURS = ("/kvplan/", "/threading.py", "/queue.py", "/contextlib.py", "/weakref.py")
TESTS = str(Path(__file__).parent)
EVENTS = frozenset(("call", "return", "c_return"))


class Interrupt:
    """Raises once, at the point of this number, counted from 1; or does something there, as a handler may.

    Attributes:
        points: how many were passed.
        where: the one at which it raised, for messages.

    Args:
        at: the point.
        do: what to do there instead.
    """

    def __init__(self, at: int, do: Callable[[], object] | None = None) -> None:
        self.at = at
        self.do = do
        self.points = 0
        self.where = ""

    def within(self, call: Callable[[], Any]) -> bool:
        """Call something; whether it was interrupted."""
        before = sys.getprofile()
        sys.setprofile(self._look)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(before)
        return bool(self.where)  # also where Python swallowed it, in a finalizer

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in EVENTS or not _ours(frame.f_code.co_filename):
            return
        self.points += 1
        if self.points == self.at:
            sys.setprofile(None)
            name = frame.f_code.co_filename.rsplit("/", 1)[-1]
            what = f"{event} of {getattr(arg, '__qualname__', arg)}" if event == "c_return" else event
            self.where = f"{what}, {name}:{frame.f_lineno} {frame.f_code.co_name}"
            if self.do is None:
                raise KeyboardInterrupt
            self.do()


@cache  # asked at every step
def _ours(name: str) -> bool:
    return any(part in name for part in OURS) and not name.startswith(TESTS)
