"""The loop of another process that does what a test asks for."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any


def answer(make: Callable[[], Any], pipe: Any) -> None:
    """Make a worker, call its methods that the pipe names, and send what they return, until the pipe says None."""
    try:
        worker = make()
    except Exception as error:
        pipe.send(("error", f"the other process could not begin: {type(error).__name__}: {error}"))
        raise
    pipe.send(("made", None))
    while (asked := pipe.recv()) is not None:
        method, args = asked
        try:
            pipe.send(("did", getattr(worker, method)(*args)))
        except Exception as error:  # noqa: BLE001  # the test looks at it
            traceback.print_exc()
            pipe.send(("error", f"{type(error).__name__}: {error}"))


def answered(pipe: Any, process: Any, seconds: float) -> Any:
    """Return the kind and the value of the other process's next answer."""
    assert pipe.poll(seconds), "the other process does not answer"
    try:
        return pipe.recv()
    except EOFError:
        process.join(seconds)
        raise EOFError(f"the other process has ended, with the exit code {process.exitcode}") from None
