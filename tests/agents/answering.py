"""The loop of another process that does what a test asks for."""

from __future__ import annotations

import traceback
from typing import Any


def answer(worker: Any, pipe: Any) -> None:
    """Call the methods that the pipe names, and send what they return, until the pipe says None."""
    pipe.send(("made", None))
    while (asked := pipe.recv()) is not None:
        method, args = asked
        try:
            pipe.send(("did", getattr(worker, method)(*args)))
        except Exception as error:  # noqa: BLE001  # the test looks at it
            traceback.print_exc()
            pipe.send(("error", f"{type(error).__name__}: {error}"))
