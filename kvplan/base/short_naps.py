"""Naps of tens of microseconds, which Linux makes longer unless a thread asks for exact ones."""

from __future__ import annotations

import ctypes
import sys

TIMER_SLACK = 29  # PR_SET_TIMERSLACK of prctl
SLACK_NS = 1000  # the default is 50,000: a nap of 20 us then takes over 70


def exact_naps() -> bool:
    """Let naps of the calling thread end when they should, and not up to 50 us later; return whether that was set.

    Other threads keep their setting. It is False on systems other than Linux.

    >>> import threading
    >>> told = []
    >>> thread = threading.Thread(target=lambda: told.append(exact_naps()))
    >>> thread.start(), thread.join(), told == [sys.platform == "linux"]
    (None, None, True)
    """
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(TIMER_SLACK, ctypes.c_ulong(SLACK_NS), 0, 0, 0) == 0)
    except (OSError, AttributeError):  # a libc without it
        return False
