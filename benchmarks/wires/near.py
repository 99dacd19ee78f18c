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
from benchmarks.wires.beside import beside_decode
from benchmarks.wires.far import FAR, NEAR, ORDERS, Side
from benchmarks.wires.limits import Scale, Wire
from benchmarks.wires.posted import Posted, one_message, ways_of
from kvplan.plan.nixl_lists import memory_of

PATIENCE = 60.0
# All; NIXL as it comes, with its own thread in both processes; all but a descriptor each; packed beside compute.
WHAT = ("all", "NIXL", "packed", "decode")
Found = dict[str, Any]


def measure(
    wire: Wire,
    scale: Scale,
    device: str,
    far: Connection,
    answer: Connection,
    what: str,
) -> None:
    """Measure a wire and send what was found; ``far`` leads to the other process, and ``what`` is one of ``WHAT``."""
    try:
        answer.send(("found", _measured(wire, scale, device, far, what)))
    except BaseException as error:  # noqa: BLE001  # the other end of the pipe reports it
        answer.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        far.send("end")


def _measured(wire: Wire, scale: Scale, device: str, far: Connection, what: str) -> Found:
    side = Side(NEAR, ORDERS[NEAR], wire, scale, device, plain=what == "NIXL", beside=what)
    if not far.poll(PATIENCE):
        raise RuntimeError("the other process does not answer")
    card = far.recv()
    far.send(side.agent.card())
    case = Case(side, side.agent.meet(card), far, posts=what == "all")
    if what == "NIXL":
        found: Found = {"rows": {row: case.posted(row) for row in scale.rows}}
    elif what == "decode":
        found = {"one message": case.one_message()} | beside_decode(case)
    else:
        found = {"one message": case.one_message(), "rows": {row: case.rows(row) for row in scale.rows}}
        found["note"] = case.note_there_and_back()
        found["one block"] = case.one_block(scale.rows[0])
    side.agent.close()
    return found


class Case:
    """Measurements over one wire.

    Args:
        side: this process.
        peer: the other one.
        far: the pipe to it.
        posts: whether transfers with a descriptor for each row are measured, too.
    """

    def __init__(self, side: Side, peer: Any, far: Connection, *, posts: bool) -> None:
        self.side, self.peer, self.far, self.posts = side, peer, far, posts
        self.own = peer.nixl.own  # this process's agent of NIXL

    def ask(self, *what: Any) -> Any:
        """Return the other process's answer."""
        self.far.send(what)
        if not self.far.poll(PATIENCE):
            raise RuntimeError("the other process does not answer")
        return self.far.recv()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the threads of this process's agent away from NIXL, which takes calls of one thread at a time."""
        with self.own.lock:
            yield

    def one_message(self) -> dict[str, float]:
        """Return the GB/s of one large message, read and written."""
        wire, scale = self.side.wire, self.side.scale
        row = str(max(scale.rows))
        here, there = self.side.agent.layouts[row].regions[0], self.peer.layouts[row].regions[0]
        memory, number = memory_of(here.device, "the pool")
        mine, theirs = (here.address, number), (there.address, memory_of(there.device, "the pool")[1])
        nbytes = min(here.nbytes, there.nbytes)
        with self.alone():
            return one_message(self.own.nixl, FAR, mine, theirs, nbytes, memory, scale.repeats, wire.paced)

    def plans(self, row: int) -> tuple[Any, Any, Any, Any]:
        """Return the plans to read and to write all blocks, in another order, and the ids here and there."""
        a, b = self.ids(row)
        return *self.plans_of(row, a, b), a, b

    def ids(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all blocks in random order, there and here."""
        blocks, rng = self.side.scale.blocks(row), np.random.default_rng(row)
        return rng.permutation(blocks), rng.permutation(blocks)

    def plans_of(self, row: int, a: np.ndarray, b: np.ndarray) -> tuple[Any, Any]:
        """Return the plans to read and to write some blocks."""
        mine, theirs = self.side.agent.layouts[str(row)], self.peer.layouts[str(row)]
        return kvplan.compile(theirs, mine).plan(a, b), kvplan.compile(mine, theirs).plan(b, a)

    def posts_of(self, row: int) -> tuple[dict[str, Posted], int, int]:
        """Return the ways with a descriptor for each row, their bytes, and their rows: some blocks, or all of them."""
        a, b = self.ids(row)
        count = max(self.side.scale.most_posted // self.side.scale.layers, 1)
        load, store = self.plans_of(row, a[:count], b[:count])
        return ways_of(self.own.nixl, FAR, load, store), load.nbytes, load.nbytes // row

    def posted(self, row: int) -> Found:
        """Return the GB/s of a descriptor for each row, by way, and the rows."""
        posts, nbytes, count = self.posts_of(row)
        taken: dict[str, list[float]] = {name: [] for name in posts}
        for _ in range(self.side.scale.repeats):
            for name, post in posts.items():
                taken[name].append(post())
        for post in posts.values():
            post.release()
        return {"GB/s": {name: nbytes / median(times) / 1e9 for name, times in taken.items()}, "rows": count}

    def rows(self, row: int) -> Found:
        """Return what packed transfers of one size of rows take, beside a descriptor for each row."""
        side, scale = self.side, self.side.scale
        load, store, a, b = self.plans(row)
        posts, posted_nbytes, posted_rows = self.posts_of(row) if self.posts else ({}, 0, 0)
        self.check(row, load, store, a, b)
        seconds: dict[str, list[float]] = {name: [] for name in (*posts, "packed pull", "packed push")}
        cpu: dict[str, list[tuple[float, float]]] = {"packed pull": [], "packed push": []}
        messages = {}
        for _ in range(scale.repeats):
            if posts and side.wire.transports:  # the other process must help
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
            "nbytes": nbytes, "descriptors": len(load.descriptors().size), "posted rows": posted_rows,
            "GB/s": {
                name: (posted_nbytes if name in posts else nbytes) / median(taken) / 1e9
                for name, taken in seconds.items()
            },
            "CPU ms per GB": {
                name: [median(one[k] for one in taken) * 1e12 / nbytes for k in (0, 1)] for name, taken in cpu.items()
            },
            "messages": {name: {"chunks": chunks, "posted": posted} for name, (chunks, posted) in messages.items()},
        }  # fmt: skip

    def check(self, row: int, load: Any, store: Any, a: Any, b: Any) -> None:
        """Compare every byte of a pull and of a push; each process makes both contents. They also warm all up."""
        side = self.side
        self.ask("fill", row)
        self.peer.submit(load, way="packed").synchronize(PATIENCE)
        if not side.holds(row, b, a, row):
            raise RuntimeError(f"wrong bytes after a packed pull of rows of {row} bytes")
        side.fill(row + 1)
        self.peer.submit(store, way="packed").synchronize(PATIENCE)
        if not self.ask("holds", row, a, b, row + 1):
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
        """Return the microseconds of transfers of one block, of ``layers`` rows: by each way, and by NIXL alone.

        NIXL has prepared its lists before, and its caller looks without a pause.
        """
        mine, theirs = self.side.agent.layouts[str(row)], self.peer.layouts[str(row)]
        load, store = kvplan.compile(theirs, mine), kvplan.compile(mine, theirs)
        found: Found = {}
        for name, program in (("pull", load), ("push", store)):
            for way in ("auto", "packed", "direct"):
                taken = []
                for k in range(self.side.scale.single):
                    plan = program.plan([k % 2], [1 - k % 2])
                    begun = time.perf_counter()
                    self.peer.submit(plan, way=way).synchronize()
                    taken.append(time.perf_counter() - begun)
                found[f"{way} {name}"] = median(taken) * 1e6
        posts = ways_of(self.own.nixl, FAR, load.plan([0], [1]), store.plan([0], [1]))
        for name, post in posts.items():
            with self.alone():
                found[name] = median(post() for _ in range(self.side.scale.single)) * 1e6
            post.release()
        return found
