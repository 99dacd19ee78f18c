"""KeyboardInterrupt at every point of a call where Python may run a signal's handler, one after another.

Python looks at signals after calls, on entry of functions and at jumps back. A profiler is told of the first two: it
raises there, in the main thread, what a handler would. What it does on top, at the returns of Python's functions, no
signal could; nothing may break by that either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

OURS = ("/kvplan/", "/threading.py", "/queue.py", "/contextlib.py", "/weakref.py")
DEVICE = "/tests/simulated/"
EVENTS = frozenset(("call", "return", "c_return"))


class Interrupt:
    """Raises once, at the point of this number, counted from 1; or does something there, as a handler may.

    Attributes:
        points: how many were passed.
        where: the one at which it raised, for messages.

    Args:
        jumps: the points are the jumps back of loops, and no others; found by tracing, which is slow.
    """

    def __init__(self, at: int, do: Callable[[], object] | None = None, *, jumps: bool = False) -> None:
        self.at = at
        self.do = do
        self.jumps = jumps
        self._lasts: dict[FrameType, int] = {}
        self.points = 0
        self.where = ""

    def within(self, call: Callable[[], Any]) -> bool:
        """Call something; whether it was interrupted."""
        begin, end = (sys.settrace, sys.gettrace()) if self.jumps else (sys.setprofile, sys.getprofile())
        look = self._enter if self.jumps else self._look  # Python may still call it after a finalizer has taken it out
        begin(look)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            begin(end)
            self._lasts.clear()
        return bool(self.where)  # also where Python swallowed it, in a finalizer

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in EVENTS:
            return
        name = frame.f_code.co_filename
        if _of_the_device(name):  # its methods stand for calls of C: what matters is that they have returned
            caller = frame.f_back
            if event != "return" or caller is None or not _ours(caller.f_code.co_filename):
                return
        elif not _ours(name):
            return
        self._point(frame, f"{event} of {getattr(arg, '__qualname__', arg)}" if event == "c_return" else event)

    def _point(self, frame: FrameType, what: str) -> None:
        self.points += 1
        if self.points == self.at:
            (sys.settrace if self.jumps else sys.setprofile)(None)
            name = frame.f_code.co_filename.rsplit("/", 1)[-1]
            self.where = f"{what}, {name}:{frame.f_lineno} {frame.f_code.co_name}"
            if self.do is None:
                raise KeyboardInterrupt
            self.do()

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "call" or not _ours(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            last, self._lasts[frame] = self._lasts.get(frame, -1), frame.f_lasti
            if frame.f_lasti < last and not self.where:
                self._point(frame, "jump back")
        return self._step


@cache
def _of_the_device(name: str) -> bool:
    return DEVICE in name


@cache  # asked at every step
def _ours(name: str) -> bool:
    return any(part in name for part in OURS) and "/tests/" not in name
