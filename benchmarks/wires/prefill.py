"""A packed push by layer beside prefill: when the other process has the last layer, by when its compute had ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Any

import kvplan
from benchmarks.wires.beside import ROW, StandIn
from kvplan.measure.compute import Compute, compute_of

if TYPE_CHECKING:
    from benchmarks.wires.near import Case

COMPUTE = 1.5  # a layer's compute, in times of what its push takes alone: transfers keep up
WARM, WARM_TURNS, REST, NAP = 20, 3, 2e-3, 2e-5
PATIENCE = 60.0
NOTE = b"pushed"
Found = dict[str, Any]


def arrival(notes: Callable[[], list[tuple[str, bytes]]], awaited: bytes) -> float | None:
    """Return when a note has come, by the machine's clock, or None; look for it as an engine may, with short naps."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if any(note == awaited for _, note in notes()):
            return time.monotonic()
        time.sleep(NAP)
    return None


def beside_prefill(case: Case) -> Found:
    """Push a layer by itself, and all layers while each is computed, in turns; all bytes are compared before.

    Raises:
        RuntimeError: bytes are wrong, or the last layer has come before it can have.
    """
    peer, theirs, mine = case.peer, case.peer.layouts[str(ROW)], case.side.agent.layouts[str(ROW)]
    load, store, a, b = case.plans(ROW)
    case.check(ROW, load, store, a, b)
    last = mine.layers[-1]
    one = kvplan.compile(mine.slice(layers=[last]), theirs.slice(layers=[last])).plan(b, a)

    def alone() -> float:
        begun, transfer, seen = _pushed(case, lambda: peer.submit(one, way="packed", note=NOTE))
        transfer.synchronize(PATIENCE)
        return seen - begun

    seconds = median([alone() for _ in range(WARM_TURNS)])
    compute: Compute = StandIn() if case.side.device == "cpu" else compute_of(case.side.device, "prefill")
    products = ceil(COMPUTE * seconds * 1e3 / _iteration(compute))
    floor = one.nbytes / case.side.wire.paced / 1e9 if case.side.wire.paced else 0.0

    def beside() -> tuple[float, float]:
        compute.drain()
        started = time.monotonic()  # not later than the first mark, so no tail is shorter than it was
        first, marks = compute.mark(), dict[int, Any]()
        for layer in mine.layers:
            for _ in range(products):
                compute.enqueue()
            marks[layer] = compute.mark()
        _, transfer, seen = _pushed(
            case, lambda: peer.submit(store, way="packed", after=marks, by_layer=True, note=NOTE)
        )
        transfer.synchronize(PATIENCE)
        computed = first.elapsed_time(marks[last]) / 1e3
        return computed, tail_of(seen - started - computed, floor)

    case.side.fill(ROW + 2)
    beside()
    if not case.ask("holds", ROW, a, b, ROW + 2):
        raise RuntimeError("wrong bytes after a packed push by layer")

    turns = [(alone(), *beside()) for _ in range(-WARM_TURNS, case.side.scale.repeats)][WARM_TURNS:]
    taken, computed, tails = ([1e6 * value for value in column] for column in zip(*turns, strict=True))
    return {
        "one message": case.one_message(), "note": case.note_there_and_back(),
        "prefill": {
            "layers": len(mine.layers), "layer nbytes": one.nbytes, "products a layer": products,
            "compute us": median(computed), "alone us": median(taken), "tail us": tails,
        },
    }  # fmt: skip


def tail_of(seconds: float, floor: float) -> float:
    """Return the seconds from a layer's compute to its arrival; raise RuntimeError if it was sent too soon.

    >>> tail_of(2e-3, 1e-3)
    0.002
    """
    if seconds < floor:
        raise RuntimeError(f"the last layer has come {1e3 * seconds:.2f} ms after its compute, too soon for its bytes")
    return seconds


def _pushed(case: Case, submit: Callable[[], Any]) -> tuple[float, Any, float]:
    """Return when a push was submitted, its transfer, and when the other process had its note."""
    case.far.send(("arrival", NOTE))
    time.sleep(REST)  # until it listens
    begun, transfer = time.monotonic(), submit()
    if not case.far.poll(2 * PATIENCE):
        raise RuntimeError("the other process does not answer")
    seen = case.far.recv()
    if seen is None:
        raise RuntimeError(f"the note of a push has not come within {PATIENCE:.0f} seconds")
    return begun, transfer, seen


def _iteration(compute: Compute) -> float:
    """Return the milliseconds of an iteration of compute."""
    marks = [compute.mark()]
    for _ in range(WARM):
        compute.enqueue()
        marks.append(compute.mark())
    compute.drain()
    return median(before.elapsed_time(after) for before, after in pairwise(marks))
