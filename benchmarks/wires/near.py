"""The process that measures one wire: packed transfers beside NIXL's own, sample by sample."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

import kvplan
from benchmarks.wires.far import FAR, NEAR, Side
from benchmarks.wires.limits import Scale, Wire
from benchmarks.wires.posted import one_message, ways_of
from kvplan.plan.nixl_lists import memory_of

PATIENCE = 60.0
Found = dict[str, Any]


def measure(
    wire: Wire,
    scale: Scale,
    device: str,
    far: Connection,
    answer: Connection,
    plain: bool,
) -> None:
    """Measure a wire and send what was found; ``far`` leads to the other process.

    With ``plain`` only NIXL is measured, as it comes: with its own thread in both processes.
    """
    try:
        answer.send(("found", _measured(wire, scale, device, far, plain=plain)))
    except BaseException as error:  # noqa: BLE001  # the other end of the pipe reports it
        answer.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        far.send("end")


def _measured(wire: Wire, scale: Scale, device: str, far: Connection, *, plain: bool) -> Found:
    side = Side(NEAR, "layer block dim", wire, scale, device, plain=plain)
    if not far.poll(PATIENCE):
        raise RuntimeError("the other process does not answer")
    card = far.recv()
    far.send(side.agent.card())
    peer = side.agent.meet(card)
    case = _Case(side, peer, far)
    if plain:
        found: Found = {"rows": {row: case.posted(row) for row in scale.rows}}
        side.agent.close()
        return found
    largest = peer.layouts[str(max(scale.rows))].regions[0]
    here = side.agent.layouts[str(max(scale.rows))].regions[0]
    nbytes = min(largest.nbytes, here.nbytes)
    memory, number = memory_of(here.device, "the pool")
    there = memory_of(largest.device, "the pool")[1]
    with case.alone():
        whole = one_message(
            case.own.nixl, FAR, (here.address, number), (largest.address, there), nbytes, memory, scale.repeats
        )
    found = {"one message": whole, "rows": {row: case.rows(row) for row in scale.rows}}
    found["note"] = case.note_there_and_back()
    found["one block"] = case.one_block(scale.rows[0])
    side.agent.close()
    return found


class _Case:
    """What is measured over one wire."""

    def __init__(self, side: Side, peer: Any, far: Connection) -> None:
        self.side, self.peer, self.far = side, peer, far
        self.own = peer.nixl.own  # this process's agent of NIXL

    def ask(self, *what: Any) -> Any:
        self.far.send(what)
        if not self.far.poll(PATIENCE):
            raise RuntimeError("the other process does not answer")
        return self.far.recv()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the threads of this process's agent away from NIXL, which takes calls of one thread at a time."""
        with self.own.lock:
            yield

    def plans(self, row: int) -> tuple[Any, Any, Any, Any]:
        """Return the plans to read and to write all blocks, in another order, and the ids here and there."""
        blocks = self.side.scale.blocks(row)
        mine, theirs = self.side.agent.layouts[str(row)], self.peer.layouts[str(row)]
        rng = np.random.default_rng(row)
        a, b = rng.permutation(blocks), rng.permutation(blocks)
        return kvplan.compile(theirs, mine).plan(a, b), kvplan.compile(mine, theirs).plan(b, a), a, b

    def posted(self, row: int) -> dict[str, float]:
        """Return the GB/s of a descriptor for each row, by way."""
        load, store, _, _ = self.plans(row)
        posts = ways_of(self.own.nixl, FAR, load, store)
        taken: dict[str, list[float]] = {name: [] for name in posts}
        for _ in range(self.side.scale.repeats):
            for name, post in posts.items():
                taken[name].append(post())
        for post in posts.values():
            post.release()
        return {name: load.nbytes / median(times) / 1e9 for name, times in taken.items()}

    def rows(self, row: int) -> Found:
        side, scale = self.side, self.side.scale
        load, store, a, b = self.plans(row)
        posts = ways_of(self.own.nixl, FAR, load, store)
        self.check(row, load, store, a, b)
        seconds: dict[str, list[float]] = {name: [] for name in (*posts, "packed pull", "packed push")}
        cpu: dict[str, list[tuple[float, float]]] = {"packed pull": [], "packed push": []}
        messages = {}
        for _ in range(scale.repeats):
            if side.wire.transports:  # the other process must help
                self.ask("spin")
            for name, post in posts.items():
                with self.alone():
                    seconds[name].append(post())
            for name, plan in (("packed pull", load), ("packed push", store)):
                before = time.process_time(), self.ask("cpu")
                begun = time.perf_counter()
                result = self.peer.submit(plan, way="packed").result()
                seconds[name].append(time.perf_counter() - begun)
                cpu[name].append((time.process_time() - before[0], self.ask("cpu") - before[1]))
                messages[name] = (result.descriptors, result.launches)
        for post in posts.values():
            post.release()
        nbytes = load.nbytes
        return {
            "nbytes": nbytes, "descriptors": len(load.descriptors().size),
            "GB/s": {name: nbytes / median(taken) / 1e9 for name, taken in seconds.items()},
            "CPU ms per GB": {
                name: [median(one[k] for one in taken) * 1e12 / nbytes for k in (0, 1)] for name, taken in cpu.items()
            },
            "messages": {name: {"chunks": chunks, "posted": posted} for name, (chunks, posted) in messages.items()},
        }  # fmt: skip

    def check(self, row: int, load: Any, store: Any, a: Any, b: Any) -> None:
        """Compare every byte of a pull and of a push. They also warm all up."""
        side = self.side
        self.ask("fill", row)
        self.peer.submit(load, way="packed").synchronize(PATIENCE)
        shape = (side.scale.blocks(row), side.scale.layers, row)
        theirs = np.frombuffer(self.ask("holds", row), np.uint8).reshape(shape)
        if not np.array_equal(side.holds(row)[b], theirs[a]):
            raise RuntimeError(f"wrong bytes after a packed pull of rows of {row} bytes")
        side.fill(row + 1)
        self.peer.submit(store, way="packed").synchronize(PATIENCE)
        theirs = np.frombuffer(self.ask("holds", row), np.uint8).reshape(shape)
        if not np.array_equal(side.holds(row)[b], theirs[a]):
            raise RuntimeError(f"wrong bytes after a packed push of rows of {row} bytes")

    def note_there_and_back(self) -> Found:
        """Return the microseconds of a note to the other process and back; both only look for notes."""
        taken = []
        for _ in range(self.side.scale.single):
            begun = time.perf_counter()
            self.peer.send(b"echo")
            while not self.side.agent.notes():
                pass
            taken.append(time.perf_counter() - begun)
        self.peer.send(b"rest")
        return {"us": median(taken) * 1e6}

    def one_block(self, row: int) -> Found:
        """Return the microseconds of transfers of one block, of ``layers`` rows."""
        mine, theirs = self.side.agent.layouts[str(row)], self.peer.layouts[str(row)]
        load, store = kvplan.compile(theirs, mine), kvplan.compile(mine, theirs)
        found: Found = {}
        for name, program, way in (
            ("packed pull", load, "packed"), ("packed push", store, "packed"), ("direct pull", load, "direct"),
        ):  # fmt: skip
            taken = []
            for k in range(self.side.scale.single):
                plan = program.plan([k % 2], [1 - k % 2])
                begun = time.perf_counter()
                self.peer.submit(plan, way=way).synchronize()
                taken.append(time.perf_counter() - begun)
            found[name] = median(taken) * 1e6
        return found
