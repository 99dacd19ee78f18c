"""Rows between two processes by real NIXL, through kvplan's agent with its interface: packed, and a descriptor each."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np

from kvplan.engines.nixl import Agent
from kvplan.engines.nixl.interface import agent_class
from tests.patience import PATIENCE

BLOCK = 1024  # bytes from row to row
PLAIN = "plain"  # NIXL's own agent


class Pool:
    """A pool of rows, and an agent that has registered it."""

    def __init__(self, name: str, content: np.ndarray, packed: str) -> None:
        self.memory = content.copy()
        self.address = self.memory.ctypes.data
        self.agent = agent_class()(name) if packed == PLAIN else Agent(name, packed=packed)
        self.registered = self.agent.register_memory([(self.address, self.memory.nbytes, 0, "")], "DRAM")
        self.unread: list[bytes] = []

    def list_of(self, name: str, address: int, nbytes: int) -> Any:
        table = np.array([[address, nbytes, 0, BLOCK, len(self.memory)]], dtype=np.uint64)
        return self.agent.prep_xfer_dlist(name, table, "DRAM")

    def await_note(self, note: bytes) -> np.ndarray:
        """Wait for a notification, and return the bytes as they are when it is seen."""
        end = time.monotonic() + PATIENCE
        while note not in self.unread:
            for notes in self.agent.get_new_notifs().values():
                self.unread += notes
            if time.monotonic() > end:
                raise TimeoutError(note)
        return self.memory.copy()


def serve(pipe: Any, packed: str, content: np.ndarray) -> None:
    """Be the other process: answer each question."""
    pool = Pool("prefill", content, packed)
    pipe.send((pool.agent.get_agent_metadata(), pool.address))
    while (asked := pipe.recv()) is not None:
        name, *given = asked
        pipe.send({"await": pool.await_note, "told": lambda: pool.unread, "content": pool.memory.copy}[name](*given))


class Near:
    """This process's pool, and the other process."""

    def __init__(self, rows: int, nbytes: int, *, mine: str = "always", theirs: str = "always") -> None:
        self.rng, self.rows, self.nbytes = np.random.default_rng(rows + nbytes), rows, nbytes
        self.here, self.there = (self.rng.integers(0, 256, (rows, BLOCK), np.uint8) for _ in range(2))
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, theirs, self.there), daemon=True)
        self.process.start()
        other.close()
        self.pool = Pool("decode", self.here, mine)
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError("the other process has not begun")
        metadata, address = self.pipe.recv()
        agent = self.pool.agent
        self.name = agent.add_remote_agent(metadata)
        self.lists = (
            self.pool.list_of("NIXL_INIT_AGENT", self.pool.address, nbytes),
            self.pool.list_of(self.name, address, nbytes),
        )

    def ask(self, *question: object) -> Any:
        self.pipe.send(question)
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError(question)
        return self.pipe.recv()

    def choose(self, count: int, *, strided: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return row numbers of both sides: random ones, or every second one."""
        if strided:
            return np.arange(count) * 2 % self.rows, np.arange(count)
        return self.rng.permutation(self.rows)[:count], self.rng.permutation(self.rows)[:count]

    def make(self, operation: str, here: Any, there: Any, note: bytes = b"") -> Any:
        return self.pool.agent.make_prepped_xfer(operation, self.lists[0], here, self.lists[1], there, note)

    def post(self, handle: Any) -> None:
        """Post a transfer, and wait for its end."""
        state, end = self.pool.agent.transfer(handle), time.monotonic() + PATIENCE
        while state == "PROC" and time.monotonic() < end:
            state = self.pool.agent.check_xfer_state(handle)
        assert state == "DONE"

    def moved(self, operation: str, here: Any, there: Any) -> None:
        """Move the rows of what both pools should hold."""
        n = self.nbytes
        if operation == "READ":
            self.here[here, :n] = self.there[there, :n]
        else:
            self.there[there, :n] = self.here[here, :n]

    def close(self) -> None:
        if self.process.is_alive():
            self.pool.agent.remove_remote_agent(self.name)
            self.pipe.send(None)
        self.process.join(PATIENCE)
        self.process.kill()
        self.pipe.close()


def checked(near: Near, turns: int, count: int) -> None:
    """Move rows in both directions; compare every byte, also of the peer as it is when the notification comes."""
    for turn in range(turns):
        operation, note = ("READ", "WRITE")[turn % 2], b"turn %d" % turn
        here, there = near.choose(count, strided=turn % 4 > 1)
        handle = near.make(operation, here, there, note)
        for _ in range(2):  # posted again, it moves again
            near.post(handle)
        near.moved(operation, here, there)
        np.testing.assert_array_equal(near.pool.memory, near.here)
        np.testing.assert_array_equal(near.ask("await", note), near.there)
        near.pool.agent.release_xfer_handle(handle)
    told = near.ask("told")
    expected = [b"turn %d" % (k // 2) for k in range(2 * turns)]
    end = time.monotonic() + PATIENCE
    while len(told) < len(expected) and time.monotonic() < end:
        near.ask("content")
        told = near.ask("told")
    assert told == expected, told
