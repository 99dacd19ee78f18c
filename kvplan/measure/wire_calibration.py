"""Calibrate a wire: measure lists, notes, packed transfers and copies, and fit the costs of a profile to them."""

from __future__ import annotations

import base64
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from kvplan.agents.packed.ring import Slots, ring_for, slots_of_a_peer
from kvplan.base import __version__
from kvplan.cost.model import NS
from kvplan.cost.store import find_for
from kvplan.cost.wire import (
    CopyCosts,
    Crossing,
    WireProfile,
    best_slot,
    crossing_of,
    default_wire,
    packed_cost,
    wire_name,
)
from kvplan.errors import KVPlanError
from kvplan.execute.executor import Executor
from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.fit import relative
from kvplan.measure.processes import BY_NIXL, PoolOwner, pool_name, pools
from kvplan.measure.rig import Progress, silent, timed
from kvplan.measure.wire_posts import Posted, measured, slot_bytes, wire_ends
from kvplan.measure.workload import Geometry
from kvplan.plan.copy_program import compile

SECONDS = 20.0
# If the call that posts takes more than half as long for a byte as the whole transfer, the CPU that posts moves bytes.
BY_CPU = 0.5
# A large transfer, for which the size of a slot is chosen: 1 GiB in blocks of 1 MiB, and in runs of 8 KiB.
LARGE = Crossing(1 << 30, 1 << 10, 1 << 17, 1 << 17, 1 << 10)
COPY_NBYTES, COPY_RUNS, COPY_SAMPLES = 8 << 20, (512, 4 << 10, 64 << 10, 1 << 20), 5
# Packed transfers: a ring whose chunks are so small that their bytes cost next to nothing, and a long transfer.
SLOTS, CHUNKS, BLOCK = (32, 4096), 256, 2048
BLOCKS = CHUNKS * SLOTS[1] // BLOCK
SHORT_SAMPLES, LONG_SAMPLES = 30, 7
REST_SECONDS = 5e-3  # before each short transfer, so that the threads of both processes nap, as between requests
PATIENCE = 30.0  # seconds
STEPS, ROUNDING = 60, 1e-9  # of the search for the cost of a chunk


def calibrate_wire(
    device: str = "cpu", peer: str | None = None, tell: Progress | None = None, *, seconds: float = SECONDS
) -> tuple[WireProfile, list[Posted]]:
    """Measure what NIXL takes between this process and one that it starts, and return a profile.

    UCX chooses the transport: shared memory, TCP, ``cuda_ipc`` or RDMA. ``UCX_TLS`` limits its choice, and the name of
    the wire tells it.

    Args:
        device: ``"cpu"`` or ``"cuda:N"``: memory of this process.
        peer: memory of the other process, of the same kind; by default that of ``device``.
        tell: function that is called with the share that is done, and the step that begins.
        seconds: seconds of measuring, about.

    Returns:
        The profile, and the lists that were posted.

    Raises:
        PathError: NIXL is not installed.
        KVPlanError: the two memories are of different kinds.
        TransferError: NIXL reports a failure, or the other process does not start.
    """
    say = tell or silent
    peer = peer or device
    if device.partition(":")[0] != peer.partition(":")[0]:
        raise KVPlanError(f"device {device!r}, peer {peer!r}; give memory of one kind")
    say(0.0, "two processes")
    with wire_ends(device, peer) as ends:
        posts = measured(ends, seconds * 0.7, lambda share, step: say(0.05 + 0.65 * share, step))
        say(0.7, "slots")
        slots = slot_bytes(ends)
        say(0.75, "notes")
        latency = ends.latency()
    say(0.8, "packed transfers")
    with packed_ends(device, peer) as ends_of_packed:
        protocol = packed_times(*ends_of_packed)
    say(0.9, "copies")
    gather, scatter = _host_copies() if device == "cpu" else _kernel_copies(device)
    made = f"kvplan {__version__}, {datetime.now(UTC):%Y-%m-%d}"
    base = replace(default_wire("DRAM" if device == "cpu" else "VRAM"), wire=wire_name("UCX"), how="calibrated",
                   made=made, latency=latency, gather=gather, scatter=scatter, note="")  # fmt: skip
    return with_slots(with_protocol(fitted_wire(base, posts), protocol), slots), posts


def fitted_wire(base: WireProfile, posts: Sequence[Posted]) -> WireProfile:
    """Fit the costs of messages to lists that were timed, by least squares of relative errors.

    Args:
        base: profile with all that is not fitted.
        posts: lists of at least three different counts and sizes.

    Raises:
        KVPlanError: too few lists.

    >>> posts = [Posted(n, b, 1e-5 + n * 4e-6 + n * b * 2e-10, 1e-5 + n * 4e-6 + n * b * 2e-10)
    ...          for n in (1, 100, 10000) for b in (100, 10000)]
    >>> made = fitted_wire(default_wire("DRAM"), posts)
    >>> made.overlaps, round(made.descriptor * 1e6, 3), round(1e-9 / made.byte, 3), round(made.post * 1e6, 3)
    (False, 4.0, 5.0, 10.0)
    """
    if len({(one.descriptors, one.nbytes) for one in posts}) < 3:
        raise KVPlanError(f"{len(posts)} lists; give at least three of different counts and sizes")
    counts = [(1.0, float(one.descriptors), float(one.descriptors * one.nbytes)) for one in posts]
    calls, whole = (relative(counts, [getattr(one, time) for one in posts]) for time in ("post", "seconds"))
    if calls[2] > BY_CPU * whole[2]:
        return replace(base, overlaps=False, post=whole[0], descriptor=whole[1], message=0.0, byte=whole[2])
    return replace(base, overlaps=True, post=calls[0], descriptor=calls[1], message=whole[1], byte=whole[2])


def with_slots(wire: WireProfile, slots: Mapping[int, float]) -> WireProfile:
    """Return a wire's profile with the size of a slot that suits large transfers best.

    Only sizes count of which an agent's ring has enough slots. A ring of large slots has fewer for a peer.

    Args:
        wire: profile of the wire.
        slots: seconds for each byte of slots that are used again and again, by their bytes.

    >>> made = with_slots(default_wire("DRAM"), {1 << 20: 0.9e-10, 8 << 20: 3.2e-10})
    >>> made.slot_nbytes >> 20, made.slot_byte
    (1, 9e-11)
    """
    device = "cpu" if wire.memory == "DRAM" else "cuda:0"
    rings: dict[int, Slots] = {
        size: ring_for(device, replace(wire, how="calibrated", slot_nbytes=size)) for size in sorted(slots)
    }
    fitting = [size for size, ring in rings.items() if ring.nbytes == size] or [*rings]
    return best_slot(LARGE, [
        replace(wire, slot_nbytes=size, slot_byte=max(slots[size] - wire.message / size, 0.1 * slots[size]),
                slots=min(wire.slots, slots_of_a_peer(rings[size])))
        for size in fitting
    ])  # fmt: skip


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
        PathError: NIXL is not installed; or the other process refuses.
        TransferError: the other process does not start.
    """
    import torch

    from kvplan.agents.agent import NixlAgent

    geometry = Geometry("push", "contiguous", BLOCK // 2, 2 * BLOCKS, 2)
    flat = torch.ones(geometry.nbytes, dtype=torch.uint8, device=device)
    mine = pools(flat, [(geometry.run_nbytes, geometry.block_runs, geometry.host)])[pool_name(geometry)].layout
    with ExitStack() as stack:
        agent = stack.enter_context(NixlAgent("near packed end", {"pool": mine}, slots=SLOTS))
        other = PoolOwner(peer, geometry.nbytes, [geometry], BY_NIXL, slots=SLOTS)
        stack.callback(other.close)
        met = agent.meet(other.card())
        other.ask(ask="meet", card=base64.b64encode(agent.card()).decode())
        yield met, mine, met.layouts[pool_name(geometry)]


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

        def took(plan: Any, rest: float = 0.0) -> float:
            time.sleep(rest)
            begun = clock()
            peer.submit(plan, way="packed").synchronize(PATIENCE)
            return clock() - begun

        took(long)  # compiles, and greets
        single = statistics.median(took(short, REST_SECONDS) for _ in range(SHORT_SAMPLES))
        many = statistics.median(took(long) for _ in range(LONG_SAMPLES))
        few, every = (crossing_of(plan, most=SLOTS[1]) for plan in (short, long))
        found.append(PackedTimes(single, many, few, every, pull))
    return found


def with_protocol(wire: WireProfile, times: list[PackedTimes]) -> WireProfile:
    """Return a wire's profile with the costs of the protocol, by which its model takes as long as was measured.

    Args:
        wire: profile of the wire; all else in it was measured.
        times: pulls and pushes; the means of their costs are taken.

    >>> from kvplan.cost.wire import default_wire
    >>> few, many = Crossing(2048, 1, 1, 1, 1), Crossing(1 << 20, 512, 512, 512, 512)
    >>> made = with_protocol(default_wire("DRAM"), [PackedTimes(2e-3, 2e-3 + 255 * 5e-4, few, many, pull=True)])
    >>> small = replace(made, slot_nbytes=SLOTS[1])
    >>> [round(packed_cost(one, small).seconds * 1e3, 1) for one in (few, many)]
    [2.0, 129.5]
    """
    bare = replace(wire, chunk=0.0, start=0.0, slot_nbytes=SLOTS[1])
    chunk = statistics.fmean(_chunk_seconds(bare, one) for one in times)
    small = replace(bare, chunk=chunk)
    late = (one.one - packed_cost(one.few, small, pull=one.pull).seconds for one in times)
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


def _kernel_copies(device: str) -> tuple[CopyCosts, CopyCosts]:
    kernel = find_for(int(device.partition(":")[2] or 0)).costs["device"]["kernel"]
    fixed, run, byte = (NS * kernel.seconds[term] for term in ("fixed", "run", "byte"))
    costs = CopyCosts(max(NS * kernel.wall["fixed"], fixed), run, byte)
    return costs, costs


def _host_copies() -> tuple[CopyCosts, CopyCosts]:
    """Measure gather and scatter in host memory: runs of several sizes, to and from a contiguous slot."""
    slot, pool = np.ones(COPY_NBYTES, dtype=np.uint8), np.ones(2 * COPY_NBYTES, dtype=np.uint8)
    found = []
    with Executor("cpu") as executor:
        for gather in (True, False):
            counts, plans = [], {}
            for run in COPY_RUNS:
                runs = COPY_NBYTES // run
                rows = KVLayout.from_tensors("block dim", pool.reshape(runs, 2 * run)[:, :run])
                packed = KVLayout.from_tensors("block dim", slot.reshape(runs, run))
                program = compile(rows, packed) if gather else compile(packed, rows)
                for count in (max(runs // 16, 1), runs):
                    counts.append((1.0, float(count), float(count * run)))
                    plans[f"{count} of {run}"] = program.plan(np.arange(count), np.arange(count))
            begins = {name: (lambda plan=plan: executor.submit(plan)) for name, plan in plans.items()}
            times = timed(begins, seconds=np.inf, most=COPY_SAMPLES, warm_ups=0, rehearsed=True)
            found.append(CopyCosts(*relative(counts, [one.wall for one in times.values()])))
    return found[0], found[1]
