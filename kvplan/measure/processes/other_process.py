"""A process that this one starts, asks, and ends: a line of JSON for each question, and for each answer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kvplan.errors import KVPlanError, TransferError

END_SECONDS = 30.0


class OtherProcess:
    """A process that runs a module of kvplan.

    Args:
        module: the module, which ``python -m`` runs.
        name: name of the process in messages.
    """

    def __init__(self, module: str, name: str) -> None:
        self.name = name
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Send a question, and return its answer.

        Raises:
            KVPlanError: the process has ended.
        """
        self.tell(question)
        return self.answer()

    def tell(self, question: Mapping[str, Any]) -> None:
        """Send a question.

        Raises:
            TransferError: the process has ended.
        """
        assert self._process.stdin is not None  # it is a pipe
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TransferError(f"{self.name} has ended; its error is above") from None

    def answer(self) -> Any:
        """Return the next answer.

        Raises:
            KVPlanError: the process has ended.
        """
        assert self._process.stdout is not None  # it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise KVPlanError(f"{self.name} has ended; its error is above")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
