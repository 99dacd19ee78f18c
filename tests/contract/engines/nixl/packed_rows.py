"""Rows between two processes by real NIXL, through kvplan's agent with its interface: packed, and a descriptor each."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np

from kvplan.engines.nixl import Agent
from kvplan.engines.nixl.own_class import agent_class
from tests.patience import PATIENCE

BLOCK = 1024  # bytes from row to row
PLAIN = "plain"  # NIXL's own agent


class Pool:
    """A pool of rows on a device, and an agent that has registered it."""

    def __init__(self, name: str, device: str, rows: int, packed: str) -> None:
        self.memory: Any
        if device == "cpu":
            self.memory = np.zeros((rows, BLOCK), np.uint8)
            self.address, number = self.memory.ctypes.data, 0
        else:
            import torch

            self.memory = torch.zeros((rows, BLOCK), dtype=torch.uint8, device=device)
            self.address, number = self.memory.data_ptr(), self.memory.device.index
        self.kind, self.device, self.rows = "DRAM" if device == "cpu" else "VRAM", number, rows
        self.agent = agent_class()(name) if packed == PLAIN else Agent(name, packed=packed)
        self.registered = self.agent.register_memory([(self.address, rows * BLOCK, number, "")], self.kind)
        self.unread: list[bytes] = []

    def list_of(self, name: str, address: int, nbytes: int) -> Any:
        table = np.array([[address, nbytes, self.device, BLOCK, self.rows]], dtype=np.uint64)
        return self.agent.prep_xfer_dlist(name, table, self.kind)

    def fill(self, content: np.ndarray) -> None:
        if self.kind == "DRAM":
            self.memory[:] = content
        else:
            import torch

            self.memory.copy_(torch.from_numpy(content))
            torch.cuda.synchronize()

    def content(self) -> np.ndarray:
        return self.memory.copy() if self.kind == "DRAM" else self.memory.cpu().numpy()

    def await_note(self, note: bytes) -> np.ndarray:
        """Wait for a notification, and return the bytes as they are when it is seen."""
        end = time.monotonic() + PATIENCE
        while note not in self.unread:
            for notes in self.agent.get_new_notifs().values():
                self.unread += notes
            if time.monotonic() > end:
                raise TimeoutError(note)
        return self.content()


def serve(pipe: Any, device: str, rows: int, packed: str, content: np.ndarray) -> None:
    """Be the other process: answer each question."""
    pool = Pool("prefill", device, rows, packed)
    pool.fill(content)
    pipe.send((pool.agent.get_agent_metadata(), pool.address))
    while (asked := pipe.recv()) is not None:
        name, *given = asked
        pipe.send({"await": pool.await_note, "told": lambda: pool.unread, "content": pool.content}[name](*given))


class Near:
    """This process's pool, and the other process."""

    def __init__(self, device: str, rows: int, nbytes: int, *, mine: str = "always", theirs: str = "always") -> None:
        self.rng = np.random.default_rng(rows + nbytes)
        self.rows = rows
        contents = [self.rng.integers(0, 256, (rows, BLOCK), np.uint8) for _ in range(2)]
        self.here, self.there = contents
        self.nbytes = nbytes
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, device, rows, theirs, self.there), daemon=True)
        self.process.start()
        other.close()
        self.pool = Pool("decode", device, rows, mine)
        self.pool.fill(self.here)
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

    def post(self, handle: Any) -> float:
        """Post a transfer, wait for its end, and return the seconds that it took."""
        agent, begin = self.pool.agent, time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
            if time.perf_counter() - begin > PATIENCE:
                raise TimeoutError("the transfer has not ended")
        if state != "DONE":
            raise RuntimeError(state)
        return time.perf_counter() - begin

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
        np.testing.assert_array_equal(near.pool.content(), near.here)
        np.testing.assert_array_equal(near.ask("await", note), near.there)
        near.pool.agent.release_xfer_handle(handle)
    told = near.ask("told")
    expected = [b"turn %d" % (k // 2) for k in range(2 * turns)]
    end = time.monotonic() + PATIENCE
    while len(told) < len(expected) and time.monotonic() < end:
        near.ask("content")
        told = near.ask("told")
    assert told == expected, told
