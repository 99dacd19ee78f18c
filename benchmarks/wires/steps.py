"""``python -m benchmarks.wires.steps cuda_ipc``: where the time of packed transfers goes, step by step.

Both processes note when each chunk takes each step, and how long calls take. The clock is the machine's, so that times
of both can be compared. Nothing is saved, and nothing is judged: the notes themselves take a few microseconds a chunk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Any

import numpy as np

import kvplan
from benchmarks.wires.far import FAR, NEAR, Side
from benchmarks.wires.limits import FULL, WIRES, Scale, add_slots, slots_of
from kvplan.cli.arguments.values import positive

Marks = dict[str, dict[Any, float]]
SPANS = (  # name, the step that begins it, the step that ends it
    ("gather: submit to seen", "gather", "post"), ("write: post to seen", "post", "written"),
    ("note: post to heard", "post", "heard"), ("scatter: submit to seen", "heard", "scattered"),
    ("slot: scattered to given back", "scattered", "credit"), ("slot: all of its round", "gather", "credit"),
)  # fmt: skip
PATIENCE = 60.0


def by_thread() -> Counter[str]:
    """Return the seconds of CPU of this process so far, by the names of Python's threads; others are ``"others"``."""
    found = Counter[str]()
    for thread in threading.enumerate():
        if thread.ident is not None:
            found[thread.name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    found["others"] = time.process_time() - sum(found.values())
    return found


class Watch:
    """Notes when chunks take their steps in this process, and how long calls take."""

    def __init__(self) -> None:
        from kvplan.agents.by_nixl.nixl_packed import NixlPacked
        from kvplan.agents.packed.pack_credits import Credits
        from kvplan.agents.packed.pack_end import End
        from kvplan.agents.packed.pack_receiver import Receiver
        from kvplan.agents.packed.pack_rows import Row
        from kvplan.agents.packed.pack_sender import Sender
        from kvplan.execute.gpu.backend import GpuBackend
        from kvplan.execute.host.path import HostPath
        from kvplan.nixl.nixl_wire import NixlWire

        self.marks: Marks = defaultdict(dict)
        self.calls: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._lent: dict[tuple[int, int], Any] = {}
        for owner, name in (
            (Row, "planned"), (GpuBackend, "submit"), (HostPath, "submit"), (NixlWire, "write"), (NixlWire, "state"),
            (NixlWire, "tell"), (NixlPacked, "read"), (End, "poll"),
        ):  # fmt: skip
            self._around(owner, name, partial(self._timed, f"{owner.__name__}.{name}"))
        self._around(Sender, "_post", self._posted)
        self._around(Sender, "_sent", self._sent)
        self._around(Sender, "_begin", self._begun)
        self._around(Receiver, "_scatter", self._heard)
        self._around(Receiver, "step", self._scattered)
        self._around(Credits, "credit", self._credited)

    def _around(self, owner: Any, name: str, note: Callable[..., Any]) -> None:
        call = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: note(call, *given, **named))

    def _timed(self, name: str, call: Any, *given: Any, **named: Any) -> Any:
        begun, spent = time.perf_counter(), time.thread_time()
        found = call(*given, **named)
        spent, seconds = time.thread_time() - spent, time.perf_counter() - begun
        name = name if found is not False or name != "End.poll" else "End.poll that finds nothing"
        self.calls[name].append((seconds, spent))
        return found

    def _begun(self, call: Any, sender: Any, job: Any) -> Any:
        first, begun = job.next, time.perf_counter()
        found = call(sender, job)
        ended = time.perf_counter()
        for k in range(first, job.next):  # the submits of one round are spread evenly
            self.marks["gather"][job.number, k] = begun + (ended - begun) * (k - first + 1) / (job.next - first)
        return found

    def _posted(self, call: Any, sender: Any, chunk: Any) -> Any:
        key = chunk.job.number, chunk.number
        self._lent[chunk.lent.number, chunk.lent.turn] = key
        self.marks["post"].setdefault(key, time.perf_counter())
        return call(sender, chunk)

    def _sent(self, call: Any, sender: Any, chunk: Any) -> Any:
        self.marks["written"][chunk.job.number, chunk.number] = time.perf_counter()
        return call(sender, chunk)

    def _credited(self, call: Any, slots: Any, number: int, turn: int) -> Any:
        key = self._lent.pop((number, turn), None)
        if key is not None:
            self.marks["credit"][key] = time.perf_counter()
        return call(slots, number, turn)

    def _heard(self, call: Any, receiver: Any, inbound: Any, data: Any) -> Any:
        self.marks["heard"][inbound.number, data.chunk] = time.perf_counter()
        return call(receiver, inbound, data)

    def _scattered(self, call: Any, receiver: Any) -> Any:
        before = receiver._scattering[:]
        found = call(receiver)
        if found:
            now = time.perf_counter()
            left = {id(one) for one in receiver._scattering}
            for one in before:
                if id(one) not in left:
                    number = next(k for k, row in enumerate(one.inbound.rows) if row is one.row)
                    self.marks["scattered"][one.inbound.number, number] = now
        return found

    def take(self) -> tuple[Marks, dict[str, list[tuple[float, float]]], Counter[str]]:
        """Return the marks, the calls with their seconds and those of CPU, and all CPU so far; forget the first two."""
        found = dict(self.marks), dict(self.calls), by_thread()
        self.marks.clear()
        self.calls.clear()
        return found


def _far(wire: str, scale: Scale, device: str, pipe: Connection) -> None:
    watch = Watch()
    side = Side(FAR, "block layer dim", WIRES[wire], scale, device)
    pipe.send(side.agent.card())
    side.agent.meet(pipe.recv())
    while pipe.recv() == "take":
        pipe.send(watch.take())
    side.agent.close()


def _near(wire: str, scale: Scale, device: str, pipe: Connection) -> None:
    watch = Watch()
    side = Side(NEAR, "layer block dim", WIRES[wire], scale, device)
    card = pipe.recv()
    pipe.send(side.agent.card())
    peer = side.agent.meet(card)
    for row in scale.rows:
        blocks = scale.blocks(row)
        mine, theirs = side.agent.layouts[str(row)], peer.layouts[str(row)]
        load, store = kvplan.compile(theirs, mine), kvplan.compile(mine, theirs)
        rng = np.random.default_rng(row)
        for count in (1, blocks):
            ids = [rng.permutation(blocks)[:count] for _ in range(2)]
            for name, plan in (("pull", load.plan(*ids)), ("push", store.plan(*ids))):
                for _ in range(3):
                    peer.submit(plan, way="packed").synchronize(PATIENCE)
                told = [_once(peer, plan, watch, pipe) for _ in range(scale.repeats)]
                _show(f"{name} of {plan.nbytes / 1e6:.1f} MB, rows of {row:,} bytes", plan.nbytes, told)
    pipe.send("end")
    side.agent.close()


def _once(peer: Any, plan: Any, watch: Watch, pipe: Connection) -> dict[str, Any]:
    """Move a plan; return its seconds and chunks, and the notes of both processes."""
    pipe.send("take")
    before = watch.take()[2], pipe.recv()[2]
    begun = time.perf_counter()
    chunks = peer.submit(plan, way="packed").result().descriptors
    seconds = time.perf_counter() - begun
    time.sleep(2e-3)  # the last slots are given back
    pipe.send("take")
    sides = watch.take(), pipe.recv()
    cpu = [
        Counter({name: side[2][name] - some[name] for name in side[2]})
        for side, some in zip(sides, before, strict=True)
    ]
    return {"seconds": seconds, "chunks": chunks, "sides": sides, "cpu": cpu}


def _show(what: str, nbytes: int, told: list[dict[str, Any]]) -> None:
    seconds, chunks = median(one["seconds"] for one in told), told[0]["chunks"]
    print(f"{what}: {seconds * 1e6:,.0f} us, {nbytes / seconds / 1e9:.2f} GB/s, {chunks} chunks")
    for k, where in enumerate(("here", "there")):
        spent = {name: median(one["cpu"][k][name] for one in told) * 1e6 / chunks for name in told[0]["cpu"][k]}
        each = ", ".join(f"{name} {us:.0f}" for name, us in sorted(spent.items(), key=lambda one: -one[1]) if us >= 0.5)
        print(f"  CPU of a chunk {where}: {sum(spent.values()):.0f} us ({each})")
    for name, first, last in SPANS:
        taken = []
        for one in told:
            marks: Marks = defaultdict(dict)
            for side in one["sides"]:
                for step, times in side[0].items():
                    marks[step] |= times
            taken += [(marks[last][key] - at) * 1e6 for key, at in marks[first].items() if key in marks[last]]
        if len(taken) > 1:
            print(f"  {name:32} median {median(taken):7.0f} us, of ten one over {quantiles(taken, n=10)[-1]:7.0f} us")
    for name in sorted({name for one in told for side in one["sides"] for name in side[1]}):
        words = []
        for k, where in enumerate(("here", "there")):
            spent = [one["sides"][k][1].get(name, []) for one in told]
            count = sum(map(len, spent))
            if count:
                each, cpu = (sum([call[of] for some in spent for call in some]) / count * 1e6 for of in (0, 1))
                words.append(f"{where} {count / len(told) / chunks:6.1f} a chunk of {each:6.1f} us, CPU {cpu:6.1f}")
        print(f"  {name:32} {'; '.join(words)}")


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 if a process failed."""
    from benchmarks.wires.__main__ import devices

    parser = argparse.ArgumentParser(prog="python -m benchmarks.wires.steps", description=__doc__)
    parser.add_argument("wire", choices=list(WIRES))
    parser.add_argument("--rows", type=int, nargs="+", default=[576, 64 << 10], metavar="BYTES")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--mib", type=positive, metavar="MIB", help="size of a transfer")
    add_slots(parser)
    chosen = parser.parse_args(arguments)
    places = devices() if WIRES[chosen.wire].memory == "gpu" else ("cpu", "cpu")
    scale = replace(FULL, rows=tuple(chosen.rows), repeats=chosen.repeats, slots=slots_of(chosen))
    scale = scale.on(WIRES[chosen.wire], chosen.mib)
    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    other = spawn.Process(target=_far, args=(chosen.wire, scale, places[1], far), daemon=True)
    this = spawn.Process(target=_near, args=(chosen.wire, scale, places[0], near), daemon=True)
    try:
        other.start()
        this.start()
        this.join(3 * PATIENCE)
        return int(this.exitcode != 0)
    finally:
        for process in (this, other):
            process.kill()
            process.join()


if __name__ == "__main__":
    sys.exit(main())
