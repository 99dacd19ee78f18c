"""Other processes that end with their test."""

from __future__ import annotations

import pytest

from tests.contract.peers.pairs import Pair
from tests.contract.peers.process import Process


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder for temporary files and sockets of all other processes."""
    return tmp_path_factory.mktemp("processes")


@pytest.fixture
def start(folder):
    """A function that starts another process, which ends with the test."""
    made = []

    def begin(*before, **environment):
        made.append(Process(folder, *before, **environment))
        return made[-1]

    yield begin
    for process in made:
        process.reap()


class Standing:
    """Two processes that stay for many tests; one that a test has broken is replaced."""

    def __init__(self, folder):
        self.folder, self.processes = folder, {}

    def __getitem__(self, name):
        if name not in self.processes:
            self.processes[name] = Process(self.folder)
        return self.processes[name]

    def close(self):
        """Close the agents of both, the visitor's first."""
        try:
            for process in self.processes.values():
                process.close()
        except Exception:
            self.end()
            raise

    def end(self):
        for process in self.processes.values():
            process.reap()
        self.processes.clear()


@pytest.fixture(scope="session")
def standing(folder):
    processes = Standing(folder)
    yield processes
    processes.end()


@pytest.fixture
def pair(transport, standing):
    """Two processes that have met; both close at the end of the test."""
    yield Pair(transport, standing["near"], standing["far"])
    standing.close()
