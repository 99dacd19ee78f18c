"""The process that measures one wire: packed transfers, or NIXL's own."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

import kvplan
from benchmarks.wires.beside import beside_decode
from benchmarks.wires.far import FAR, NEAR, Side, fill
from benchmarks.wires.posted import Posted, ways_of
from benchmarks.wires.sizes import DECODE, PACKED, Scale, Wire
from kvplan.plan.descriptors import NixlList, memory_of

PATIENCE = 60.0
Found = dict[str, Any]


def measure(wire: Wire, scale: Scale, device: str, far: Connection, answer: Connection, what: str) -> None:
    """Measure a wire and send what was found; ``far`` leads to the other process."""
    try:
        answer.send((_measured(wire, scale, device, far, what), ""))
    except BaseException as error:  # the other end of the pipe reports it
        answer.send(({}, f"{type(error).__name__}: {error}"))
    finally:
        far.send(("end",))


def _measured(wire: Wire, scale: Scale, device: str, far: Connection, what: str) -> Found:
    side = Side(NEAR, wire, scale, device, what)
    if not far.poll(PATIENCE):
        raise RuntimeError("the other process does not answer")
    card = far.recv()
    far.send(side.agent.card())
    case = Case(side, side.agent.meet(card), far)
    if what == DECODE:
        found = {"one message": case.one_message(), "beside": beside_decode(case)}
    elif what == PACKED:
        found = {"one message": case.one_message(), "rows": {row: case.packed(row) for row in scale.rows}}
        found |= {"note": case.note_there_and_back(), "one block": case.one_block(scale.rows[0])}
    else:
        found = {"rows": {row: case.posted(row) for row in scale.rows}, "one block": case.one_posted(scale.rows[0])}
    side.agent.close()
    return found


class Case:
    """Measurements over one wire.

    Args:
        side: this process.
        peer: the other one.
        far: the pipe to it.
    """

    def __init__(self, side: Side, peer: Any, far: Connection) -> None:
        self.side, self.peer, self.far = side, peer, far
        self.own = peer.nixl.own  # this process's agent of NIXL, which takes calls of one thread at a time

    def ask(self, *what: Any) -> Any:
        """Return the other process's answer."""
        self.far.send(what)
        if not self.far.poll(PATIENCE):
            raise RuntimeError("the other process does not answer")
        return self.far.recv()

    def one_message(self) -> float:
        """Return the GB/s of one large message, the better of read and written; a paced wire has at most its rate."""
        row = str(max(self.side.scale.rows))
        regions = [layouts[row].regions[0] for layouts in (self.side.agent.layouts, self.peer.layouts)]
        nbytes = min(region.nbytes for region in regions)
        lists = []
        for region in regions:
            memory, number = memory_of(region.device, "the pool")
            lists.append(NixlList(np.array([(region.address, nbytes, number)], np.int64), memory))
        rates = []
        for operation in ("READ", "WRITE"):
            with self.own.lock:
                post = Posted(self.own.nixl, FAR, *lists, operation)
                post()
                rates.append(nbytes / median(post() for _ in range(self.side.scale.repeats)) / 1e9)
                post.release()
        return min(max(rates), self.side.wire.paced or max(rates))

    def plans(self, row: int, count: int | None = None) -> tuple[Any, Any, np.ndarray, np.ndarray]:
        """Return the plans to read and to write some or all blocks, in random order, and the ids there and here."""
        blocks, rng = self.side.scale.blocks(row), np.random.default_rng(row)
        there, here = (rng.permutation(blocks)[:count] for _ in range(2))
        load, store = self.programs(row)
        return load.plan(there, here), store.plan(here, there), there, here

    def programs(self, row: int) -> tuple[Any, Any]:
        """Return the programs to read and to write."""
        mine, theirs = self.side.agent.layouts[str(row)], self.peer.layouts[str(row)]
        return kvplan.compile(theirs, mine), kvplan.compile(mine, theirs)

    def posted(self, row: int) -> Found:
        """Return the GB/s of a descriptor for each row, by way, and the rows."""
        load, store, *_ = self.plans(row, max(self.side.scale.most_posted // self.side.scale.layers, 1))
        seconds = self._time_posts(ways_of(self.own.nixl, FAR, load, store), self.side.scale.repeats)
        rates = {name: load.nbytes / taken / 1e9 for name, taken in seconds.items()}
        return {"GB/s": rates, "rows": load.nbytes // row}

    def one_posted(self, row: int) -> dict[str, float]:
        """Return the microseconds of one block by each way; its caller looks without a pause."""
        load, store = self.programs(row)
        posts = ways_of(self.own.nixl, FAR, load.plan([0], [1]), store.plan([0], [1]))
        return {name: taken * 1e6 for name, taken in self._time_posts(posts, self.side.scale.single).items()}

    def _time_posts(self, posts: dict[str, Posted], repeats: int) -> dict[str, float]:
        """Return the median seconds of each way, which take turns; NIXL has prepared their lists before."""
        taken: dict[str, list[float]] = {name: [] for name in posts}
        for _ in range(repeats):
            for name, post in posts.items():
                with self.own.lock:
                    taken[name].append(post())
        for post in posts.values():
            post.release()
        return {name: median(times) for name, times in taken.items()}

    def packed(self, row: int) -> Found:
        """Return what packed transfers of one size of rows take."""
        load, store, there, here = self.plans(row)
        self.check(row, load, store, there, here)
        plans, nbytes = {"packed pull": load, "packed push": store}, load.nbytes
        seconds: dict[str, list[float]] = {name: [] for name in plans}
        cpu: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
        messages = {}
        for _ in range(self.side.scale.repeats):
            for name, plan in plans.items():
                before = time.process_time(), self.ask("cpu")
                begun = time.perf_counter()
                result = self.peer.submit(plan, way="packed").result()
                seconds[name].append(time.perf_counter() - begun)
                cpu[name].append((time.process_time() - before[0], self.ask("cpu") - before[1]))
                messages[name] = {"chunks": result.descriptors, "posted": result.launches}
        return {
            "nbytes": nbytes, "descriptors": len(load.descriptors().size), "messages": messages,
            "GB/s": {name: nbytes / median(taken) / 1e9 for name, taken in seconds.items()},
            "CPU ms per GB": {
                name: [median(one[k] for one in taken) * 1e12 / nbytes for k in (0, 1)] for name, taken in cpu.items()
            },
        }  # fmt: skip

    def check(self, row: int, load: Any, store: Any, there: np.ndarray, here: np.ndarray) -> None:
        """Compare every byte of a pull and of a push; each process makes both contents. They also warm all up."""
        side = self.side
        self.ask("fill", row)
        self.peer.submit(load, way="packed").synchronize(PATIENCE)
        if not side.holds(row, here, there, row):
            raise RuntimeError(f"wrong bytes after a packed pull of rows of {row} bytes")
        fill(side.buffer, row + 1)
        self.peer.submit(store, way="packed").synchronize(PATIENCE)
        if not self.ask("holds", row, there, here, row + 1):
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

    def one_block(self, row: int) -> dict[str, float]:
        """Return the microseconds of one block, which has ``layers`` rows, by each way."""
        found = {}
        for name, program in zip(("pull", "push"), self.programs(row), strict=True):
            for way in ("auto", "packed", "direct"):
                taken = []
                for k in range(self.side.scale.single):
                    plan = program.plan([k % 2], [1 - k % 2])
                    begun = time.perf_counter()
                    self.peer.submit(plan, way=way).synchronize()
                    taken.append(time.perf_counter() - begun)
                found[f"{way} {name}"] = median(taken) * 1e6
        return found
