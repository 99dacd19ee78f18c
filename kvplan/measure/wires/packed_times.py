"""Packed transfers between two processes, timed: the cost of kvplan's own protocol."""

from __future__ import annotations

import base64
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvplan.agents.agent import Agent
from kvplan.cost.wires.wire_model import Crossing, crossing_of, packed_cost
from kvplan.cost.wires.wire_profile import WireProfile
from kvplan.errors import TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.processes.other_process import OtherProcess
from kvplan.measure.wires.wire_memory import tensor_of
from kvplan.plan.copy_program import compile  # noqa: A004

CHILD = "kvplan.measure.wires.packed_process"
SLOTS = 32, 4096  # the ring: the bytes of such a small chunk cost next to nothing
BLOCK, CHUNKS = 2048, 256  # bytes of a block; chunks of a long transfer
BLOCKS = CHUNKS * SLOTS[1] // BLOCK
SAMPLES, LONG_SAMPLES = 30, 7
REST_SECONDS = 5e-3  # before each short transfer, so that the threads of both processes nap, as between requests
PATIENCE = 30.0  # seconds
STEPS, ROUNDING = 60, 1e-9  # of the search for the cost of a chunk


class PackedTimes(NamedTuple):
    """The times and counts of packed transfers with small chunks.

    Attributes:
        one: seconds of a transfer of one chunk that comes after a rest.
        many: seconds of a long transfer.
        few, all: counts of the two transfers.
        pull: whether they read.
    """

    one: float
    many: float
    few: Crossing
    all: Crossing
    pull: bool


@contextmanager
def packed_ends(device: str, peer: str) -> Iterator[tuple[Any, KVLayout, KVLayout]]:
    """Start a process, and meet its agent over NIXL. The process ends with the context.

    Args:
        device, peer: ``"cpu"`` or ``"cuda:N"``: memory here, and memory of the other process.

    Yields:
        The peer, a layout of this process, and one of the peer's.

    Raises:
        KVPlanError: the other process does not start, or refuses.
    """
    mine = KVLayout.from_tensors("block dim", tensor_of(device, BLOCKS * BLOCK).reshape(BLOCKS, BLOCK))
    with ExitStack() as stack:
        agent = stack.enter_context(Agent("near packed end", {"pool": mine}, transports=("nixl",), slots=SLOTS))
        other = stack.enter_context(OtherProcess(CHILD, "the process at the other end of the wire"))
        found = other.ask({"device": peer, "blocks": BLOCKS, "block": BLOCK, "slots": SLOTS})
        if "refused" in found:
            raise TransferError(f"{other.name}: {found['refused']}")
        met = agent.meet(base64.b64decode(found["card"]))
        other.ask({"card": base64.b64encode(agent.card()).decode()})
        yield met, mine, met.layouts["pool"]


def packed_times(
    peer: Any, mine: KVLayout, theirs: KVLayout, clock: Callable[[], float] = time.perf_counter
) -> list[PackedTimes]:
    """Time packed pulls and pushes of one small chunk, and of many. The times are medians.

    Args:
        peer: a peer of an agent, whose ring has slots of a few kilobytes.
        mine, theirs: layouts of both processes, of as many blocks.
        clock: returns seconds; tests replace it.

    Raises:
        TransferError: a transfer failed.
    """
    rng = np.random.default_rng(0)
    found = []
    for pull in (True, False):
        program = compile(theirs, mine) if pull else compile(mine, theirs)
        short = program.plan([1], [2])
        long = program.plan(rng.permutation(BLOCKS), rng.permutation(BLOCKS))

        def timed(plan: Any) -> float:
            begun = clock()
            peer.submit(plan, way="packed").synchronize(PATIENCE)
            return clock() - begun

        timed(long)  # compiles, and greets
        taken = []
        for _ in range(SAMPLES):
            time.sleep(REST_SECONDS)
            taken.append(timed(short))
        many = statistics.median(timed(long) for _ in range(LONG_SAMPLES))
        counts = [crossing_of(plan, most=SLOTS[1]) for plan in (short, long)]
        found.append(PackedTimes(statistics.median(taken), many, counts[0], counts[1], pull))
    return found


def with_protocol(wire: WireProfile, times: list[PackedTimes]) -> WireProfile:
    """Return a wire's profile with the costs of the protocol, by which its model takes as long as was measured.

    Args:
        wire: profile of the wire; all else in it was measured.
        times: pulls and pushes; the means of their costs are taken.

    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> few, many = Crossing(2048, 1, 1, 1, 1), Crossing(1 << 20, 512, 512, 512, 512)
    >>> made = with_protocol(default_wire("DRAM"), [PackedTimes(2e-3, 2e-3 + 255 * 5e-4, few, many, pull=True)])
    >>> small = replace(made, slot_nbytes=SLOTS[1])
    >>> [round(packed_cost(one, small).seconds * 1e3, 1) for one in (few, many)]
    [2.0, 129.5]
    """
    bare = replace(wire, chunk=0.0, start=0.0, slot_nbytes=SLOTS[1])
    chunk = statistics.fmean(_chunk_seconds(bare, one) for one in times)
    made = replace(bare, chunk=chunk)
    late = (one.one - packed_cost(one.few, made, pull=one.pull).seconds for one in times)
    return replace(wire, chunk=chunk, start=max(statistics.fmean(late), 0.0))


def _chunk_seconds(bare: WireProfile, times: PackedTimes) -> float:
    """Return the least cost of a chunk with which the long transfer takes as much longer than the short one as here."""
    more = max(times.many - times.one, 0.0) * (1 - ROUNDING)
    low, high = 0.0, more
    for _ in range(STEPS):
        chunk = (low + high) / 2
        wire = replace(bare, chunk=chunk)
        long, short = (packed_cost(one, wire, pull=times.pull).seconds for one in (times.all, times.few))
        low, high = (low, chunk) if long - short >= more else (chunk, high)
    return high
