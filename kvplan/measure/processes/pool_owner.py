"""The other process, as this one sees it: it is started, asked, and ended."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kvplan.errors import KVPlanError, TransferError
from kvplan.measure.processes.pool_layouts import PoolSpec

END_SECONDS = 30.0
CHILD = "kvplan.measure.processes.pool_process"


class PoolOwner:
    """A process that owns a pool. Its cards are there when it has started.

    Args:
        spec: its memory.

    Attributes:
        card: the card of its agent.
        layers: the card of a second agent, whose layout has a separate allocation for each layer.
        nixl: the card of its agent of NIXL, or None.
        nixl_refused: why it has no agent of NIXL, or "".

    Raises:
        KVPlanError: the process does not start.
    """

    def __init__(self, spec: PoolSpec) -> None:
        command = [sys.executable, "-m", CHILD]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        try:
            found = self._ask(spec._asdict())
        except BaseException:
            self.close()
            raise
        self.card: bytes = base64.b64decode(found["card"])
        self.layers: bytes = base64.b64decode(found["layers"])
        self.nixl: bytes | None = base64.b64decode(found["nixl"]) if found["nixl"] else None
        self.nixl_refused: str = found["nixl_refused"]

    def expect_notes(self, count: int) -> None:
        """Let the process poll its notes, until it has seen a number of them; :meth:`arrivals` returns them."""
        self._tell({"ask": "notes", "count": count})

    def arrivals(self) -> dict[str, int]:
        """Return the notes that the process has seen, with the times in nanoseconds at which it saw them."""
        return dict(self._answer())

    def _ask(self, question: Mapping[str, Any]) -> Any:
        self._tell(question)
        return self._answer()

    def _tell(self, question: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None  # it is a pipe
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TransferError("the process that owns the pool has ended; its error is above") from None

    def _answer(self) -> Any:
        assert self._process.stdout is not None  # it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise KVPlanError("the process that owns the pool has ended; its error is above")
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
