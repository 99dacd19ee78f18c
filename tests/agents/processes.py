"""Other processes, started and ended by a test."""

from __future__ import annotations

import multiprocessing
import os
import signal

from tests.agents.answering import answered
from tests.agents.workers import serve
from tests.patience import PATIENCE

# A server that has loaded all forks each process: to start one takes a twentieth of the time.
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["tests.agents.preloaded"])


class OtherError(Exception):
    """An error of the other process."""


class Other:
    """Another process that serves a pool; its methods are those of ``workers.Worker``."""

    def __init__(self, name: str, seed: int = 0, **options) -> None:
        self.begin(serve, name, seed, options)
        self.answer()

    def begin(self, target, name: str, seed: int, options: dict) -> None:
        """Start it; its first answer comes when it is ready."""
        self.pipe, theirs = server.Pipe()
        self.process = server.Process(target=target, args=(name, seed, options, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self):
        kind, value = answered(self.pipe, self.process, PATIENCE)
        if kind == "error":
            raise OtherError(value)
        return value

    def ask(self, method, *args):
        self.pipe.send((method, args))
        return self.answer()

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: self.ask(method, *args)

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE)

    def end(self):
        if not self.pipe.closed:
            if self.process.is_alive():
                self.process.kill()
            self.process.join(PATIENCE)
            self.process.close()
            self.pipe.close()
