"""What another process of a test does: it holds a cache and an agent, and does what a pipe asks for."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import kvplan
from kvplan import Agent, KVLayout
from kvplan.nixl import NixlAgent

CYCLES_A_SECOND = 1.8e9  # about those of a GPU
SLOTS = (10, 4 << 20)  # of the ring: larger than what the allocator keeps for itself


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: number of its allocation, offset and strides in bytes."""

    root: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Written:
    """A paged cache as it travels to another process: bytes of each allocation, and where its tensors lie in them."""

    notation: str
    told: dict[str, int]
    head_start: int
    layer_start: int
    roots: tuple[bytes, ...]
    tensors: Any  # nested tuples of Tensor


class Held:
    """A cache in memory of this process: private, shared, or a GPU's; the last GPU's, unless it is the near process."""

    def __init__(self, written: Written, memory: str, *, near: bool) -> None:
        self.memory = memory
        if memory == "gpu":
            import torch

            torch.cuda.set_device(0 if near else torch.cuda.device_count() - 1)
        self.roots = [self.allocate(content) for content in written.roots]
        self.layout = KVLayout.from_tensors(
            written.notation, self.view(written.tensors), sizes=written.told, head_start=written.head_start,
            layer_start=written.layer_start,
        )  # fmt: skip

    def allocate(self, content: bytes) -> Any:
        array = np.frombuffer(content, np.uint8)
        if self.memory == "gpu":
            import torch

            return torch.from_numpy(array.copy()).cuda()
        if self.memory == "private":
            return array.copy()
        like = KVLayout.from_tensors("block dim", array[None].copy())
        root = kvplan.allocate("block dim", like=like, num_blocks=1, shared=True).tensors[0]
        root[:] = array
        return root

    def view(self, tensor: Any) -> Any:
        if isinstance(tensor, tuple):
            return [self.view(each) for each in tensor]
        root, dtype = self.roots[tensor.root], np.dtype(tensor.dtype)
        if self.memory != "gpu":
            return np.ndarray(tensor.shape, dtype, root, tensor.offset, tensor.strides)
        import torch

        elements = root[tensor.offset :].view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
        return elements.as_strided(tensor.shape, [stride // dtype.itemsize for stride in tensor.strides])

    def content(self) -> list[bytes]:
        return [(root.cpu().numpy() if self.memory == "gpu" else root).tobytes() for root in self.roots]


class Worker:
    """The state of a process, and what it does when it is asked."""

    def __init__(self) -> None:
        self.agent: Any = None
        self.cache: Held | None = None
        self.numbers = count()

    def open(
        self, name: str, transport: str, written: Written | None, memory: str = "private", of: str = "Agent"
    ) -> bytes:
        """Make the agent, and return its card."""
        self.cache = None if written is None else Held(written, memory, near=name == "near")
        layouts = {} if self.cache is None else {"kv": self.cache.layout}
        if of == "NixlAgent":
            self.agent = NixlAgent(name, layouts)
        else:
            self.agent = Agent(name, layouts, transports=(transport,), slots=SLOTS)
        self.peers: dict[str, Any] = {}
        self.transfers: dict[int, Any] = {}
        self.events: dict[int, threading.Event] = {}
        return self.agent.card()

    def close(self, timeout: float | None = None) -> None:
        if self.agent is None:
            return
        self.transfers.clear()
        self.peers.clear()
        self.agent.close(**({} if timeout is None else {"timeout": timeout}))
        self.agent = self.cache = None
        gc.collect()  # NIXL closes its connections when its agent is deleted

    def card(self) -> bytes:
        return self.agent.card()

    def meet(self, card: bytes, **options: Any) -> str:
        peer = self.agent.meet(card, **options)
        self.peers[peer.name] = peer
        return peer.name

    def forget(self, name: str) -> None:
        self.agent.forget(self.peers.pop(name))

    def meet_often(self, cards: list[bytes], rounds: int, **options: Any) -> None:
        """Meet peers, move a block of each, and forget them, over and over."""
        for k in range(rounds):
            names = [self.meet(card) for card in cards]
            numbers = [self.submit(name, [k % 4], [k % 3], reading=bool(k % 2), **options) for name in names]
            for number in numbers:
                self.end(number)
            for name in names:
                self.forget(name)

    def drop(self, name: str) -> None:
        """Keep no reference to a peer that has died, and do not forget it."""
        del self.peers[name]

    def keep(self, name: str, other: str) -> None:
        """Go on knowing a peer by another name, whatever happens to it."""
        self.peers[other] = self.peers[name]

    def submit(
        self, name: str, mine: Any, theirs: Any, skips: tuple[int, int] = (0, 0), *, reading: bool,
        event: int | None = None, behind: int | None = None, events: dict[int, int] | None = None,
        busy: float = 0.0, **options: Any,
    ) -> int:  # fmt: skip
        """Begin a transfer, also behind an event, a transfer or a busy GPU, or each layer behind an event."""
        here, there = self.cache.layout, self.peers[name].layouts["kv"]
        if reading:
            plan = kvplan.compile(there, here).plan(theirs, mine, skips[1], skips[0])
        else:
            plan = kvplan.compile(here, there).plan(mine, theirs, *skips)
        if event is not None:
            options["after"] = self.event(event)
        if behind is not None:
            options["after"] = self.transfers[behind]
        if events is not None:
            options["after"] = {layer: self.event(each) for layer, each in events.items()}
        if busy:
            self.work(busy)
            options["after"] = self.stream()
        number = next(self.numbers)
        self.transfers[number] = self.peers[name].submit(plan, **options)
        return number

    def event(self, number: int) -> threading.Event:
        return self.events.setdefault(number, threading.Event())

    def set(self, number: int) -> None:
        self.event(number).set()

    def done(self, number: int) -> bool:
        return self.transfers[number].done()

    def cancel(self, number: int) -> bool:
        return self.transfers[number].cancel()

    def wait_layer(self, number: int, layer: int) -> None:
        self.transfers[number].wait_layer(layer)

    def end(self, number: int, within: float = 20.0) -> int:
        """Wait for the end of a transfer, and return its bytes."""
        until = time.monotonic() + within
        transfer = self.transfers.pop(number)
        while not transfer.done():
            assert time.monotonic() < until, f"{transfer!r} has not ended within {within} seconds"
            time.sleep(1e-3)
        return transfer.result().nbytes

    def move(self, *plan: Any, **options: Any) -> int:
        return self.end(self.submit(*plan, **options))

    def until_refused(self, name: str, blocks: list[int], *, within: float = 60.0, **options: Any) -> str:
        """Push or pull the same blocks over and over until that fails; return how."""
        until = time.monotonic() + within
        while time.monotonic() < until:
            try:
                self.move(name, blocks, blocks, **options)
            except kvplan.TransferError as error:
                return str(error)
        raise AssertionError(f"it went on for {within} seconds")

    def send(self, name: str, note: bytes) -> None:
        self.peers[name].send(note)

    def notes(self) -> list[tuple[str, bytes]]:
        return self.agent.notes()

    def hear(self, number: int, within: float = 20.0) -> list[tuple[str, bytes]]:
        """Return the next notes, as many as are told."""
        heard, until = [], time.monotonic() + within
        while len(heard) < number:
            assert time.monotonic() < until, f"{len(heard)} of {number} notes came within {within} seconds"
            heard += self.agent.notes()
        return heard

    def content(self) -> list[bytes]:
        return self.cache.content()

    def contents_at_notes(self, number: int) -> list[tuple[bytes, list[bytes]]]:
        """Return the next notes, each with the bytes that the cache held when it was seen."""
        seen: list[tuple[bytes, list[bytes]]] = []
        while len(seen) < number:
            seen += [(note, self.content()) for _, note in self.hear(1)]
        return seen

    def work(self, seconds: float) -> None:
        """Keep the GPU's stream busy."""
        import torch

        torch.cuda._sleep(int(seconds * CYCLES_A_SECOND))

    def fill(self, value: int, busy: float = 0.0) -> None:
        """Write all bytes by the GPU's stream, behind some work; return at once."""
        self.work(busy)
        for root in self.cache.roots:
            root.fill_(value)

    def stats(self) -> Any:
        return self.agent.stats()

    def publish(self) -> None:
        self.agent.publish(self.stream())

    def wait_for_visitors(self) -> None:
        self.agent.wait_for_visitors(self.stream())

    def stream(self) -> Any:
        if self.cache.memory != "gpu":
            return None
        import torch

        return torch.cuda.current_stream()

    def fork(self, name: str) -> dict[str, str | None]:
        """Fork a child that uses this process's agent, and then makes its own; return what it was told."""
        peer, plan = self.peers[name], None
        here = self.cache.layout
        plan = kvplan.compile(here, peer.layouts["kv"]).plan([0], [0])
        pipe, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                calls = {
                    "card": self.agent.card, "notes": self.agent.notes, "submit": lambda: peer.submit(plan),
                    "send": lambda: peer.send(b"x"), "forget": lambda: self.agent.forget(peer),
                    "close": self.agent.close, "own": lambda: Agent("child", {}, transports=("shm",)).close(),
                }  # fmt: skip
                os.write(theirs, repr({key: _error_of(call) for key, call in calls.items()}).encode())
            finally:
                os._exit(0)
        os.close(theirs)
        with os.fdopen(pipe, "rb") as read:
            told = read.read().decode()
        os.waitpid(child, 0)
        return eval(told)  # the child is this code

    def leave(self, code: int) -> None:
        """End as a process ends whose user never calls close()."""
        raise SystemExit(code)


def _error_of(call: Any) -> str | None:
    try:
        call()
    except Exception as error:  # the test looks at it
        return f"{type(error).__name__}: {error}"
    return None


def main(worker: Worker, pipe: Connection) -> None:
    """Do what the pipe asks for, until it is closed; then the interpreter ends as usual."""
    while True:
        try:
            method, args, options = pipe.recv()
            answer = None, getattr(worker, method)(*args, **options)
        except EOFError:
            return
        except Exception as error:  # the test looks at it
            answer = error, traceback.format_exc()
        pipe.send(answer)


if __name__ == "__main__":
    stays = Worker()  # until the interpreter ends
    main(stays, Connection(int(sys.argv[1])))
