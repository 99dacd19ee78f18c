"""The side of a process that :class:`kvplan.measure.processes.other_process.OtherProcess` starts and asks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answering() -> tuple[Any, Callable[[Any], None]]:
    """Read the first question, a line of JSON from standard input; return it, and a function that writes an answer.

    From now on standard output has the answers only. What libraries print to it, as UCX does, goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    return json.loads(sys.stdin.readline()), answer
