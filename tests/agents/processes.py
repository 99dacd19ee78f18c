"""Other processes, started, asked and ended by a test; each makes a worker, and does what a pipe asks for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 120.0  # seconds
# A server that has loaded all forks each process: to start one takes a twentieth of the time.
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["tests.agents.preloaded"])


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
        except Exception as error:  # the test looks at it
            traceback.print_exc()
            pipe.send(("error", f"{type(error).__name__}: {error}"))


def shared_pages() -> int:
    """Number of mapped pages that this process shares with others by kvplan."""
    return sum("/memfd:kvplan" in row for row in Path("/proc/self/maps").read_text().splitlines())


class Other:
    """Another process, which runs a function with a pipe behind its arguments; its methods are those of its worker.

    It starts while the test goes on; the first answer waits for it. So several start at once.
    """

    def __init__(self, serve: Callable[..., None], *args: Any, start: Any = server) -> None:
        self.pipe, theirs = start.Pipe()
        self.process = start.Process(target=serve, args=(*args, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._made = False

    def tell(self, method: str, *args: Any) -> None:
        self.pipe.send((method, args))

    def answer(self) -> Any:
        if not self._made:
            self._made = True
            self.answer()
        assert self.pipe.poll(PATIENCE), "the other process does not answer"
        try:
            kind, value = self.pipe.recv()
        except EOFError:
            self.process.join(PATIENCE)
            raise EOFError(f"the other process has ended, with the exit code {self.process.exitcode}") from None
        assert kind != "error", value
        return value

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def ask(*args: Any) -> Any:
            self.tell(method, *args)
            return self.answer()

        return ask

    def kill(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join(PATIENCE)

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(PATIENCE)
        self.process.close()
        self.pipe.close()
