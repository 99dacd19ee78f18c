"""Calibrate a wire: measure lists, notes, packed transfers and copies, and fit the costs of a profile to them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.packed.ring import ring_for, slots_of_a_peer
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
from kvplan.errors import TransferError
from kvplan.execute.executor import Executor
from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.calibrate import relative
from kvplan.measure.processes import BY_NIXL, OtherProcess, PoolOwner, pools
from kvplan.measure.rig import Progress, silent, timed
from kvplan.measure.workload import Geometry
from kvplan.plan.copy_program import compile
from kvplan.plan.descriptors import memory_of

SECONDS = 20.0
# Lists that NIXL posts.
NBYTES = 64 << 20  # bytes of the memory of each end
SIZES = (576, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes of a descriptor
COUNTS = (1, 16, 256, 2048)  # descriptors of a list
SLOT_SIZES = tuple(1 << power for power in range(20, 27))  # bytes: 1 to 64 MiB
OPERATIONS = ("WRITE", "READ")
SAMPLES, PINGS, WARM_PINGS = 5, 200, 20
ORDER = np.random.default_rng(0)  # of the rows
NEAR, FAR, PING, PONG = "near end", "far end", b"ping", b"pong"
LOOK_SECONDS = 2e-5  # between two looks for notes, so that one core serves both processes
PATIENCE = 30.0  # seconds after which a list, a note or a transfer is given up
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
STEPS, ROUNDING = 60, 1e-9  # of the search for the cost of a chunk


def calibrate_wire(
    device: str = "cpu", tell: Progress = silent, *, seconds: float = SECONDS
) -> tuple[WireProfile, list[Posted]]:
    """Measure what NIXL takes between this process and one that it starts, and return a profile.

    UCX chooses the transport: shared memory, TCP, ``cuda_ipc`` or RDMA. ``UCX_TLS`` limits its choice, and the name of
    the wire tells it.

    Args:
        device: ``"cpu"`` or ``"cuda:N"``: memory of both processes.
        tell: function that is called with the share that is done, and the step that begins.
        seconds: seconds of measuring, about.

    Returns:
        The profile, and the lists that were posted.

    Raises:
        PathError: NIXL is not installed.
        TransferError: NIXL reports a failure, or the other process does not start.
    """
    tell(0.0, "two processes")
    with wire_ends(device) as ends:
        posts = measured(ends, seconds * 0.7, lambda share, step: tell(0.05 + 0.65 * share, step))
        tell(0.7, "slots")
        slots = slot_bytes(ends)
        tell(0.75, "notes")
        latency = ends.latency()
    tell(0.8, "packed transfers")
    with packed_ends(device) as ends_of_packed:
        protocol = packed_times(*ends_of_packed)
    tell(0.9, "copies")
    gather, scatter = _host_copies() if device == "cpu" else _kernel_copies(device)
    made = f"kvplan {__version__}, {datetime.now(UTC):%Y-%m-%d}"
    base = replace(default_wire("DRAM" if device == "cpu" else "VRAM"), wire=wire_name("UCX"), how="calibrated",
                   made=made, latency=latency, gather=gather, scatter=scatter, note="")  # fmt: skip
    return with_slots(with_protocol(fitted_wire(base, posts), protocol), slots), posts


# Lists, posted one by one.


class Memory:
    """Bytes that NIXL registers, each touched, so that no page is missing while something is timed.

    Args:
        device: ``"cpu"`` or ``"cuda:N"``.
        nbytes: bytes.

    Attributes:
        layout: a layout over them, with one block.
        address: address of the first byte.
        kind: NIXL's name of the memory, ``"DRAM"`` or ``"VRAM"``.
        number: number of the device.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        self.kind, self.number = memory_of(device, "the memory of a wire")
        flat: Any = np.ones(nbytes, dtype=np.uint8)
        if device != "cpu":
            import torch

            flat = torch.ones(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
        self.layout = KVLayout.from_tensors("block dim", flat.reshape(1, -1))
        self.address = self.layout.regions[0].address


class Posted(NamedTuple):
    """A list that was posted. The times are medians.

    Attributes:
        descriptors: number of descriptors.
        nbytes: bytes of each.
        post: seconds until the call returned.
        seconds: seconds until the end was known.
        operation: ``"WRITE"`` or ``"READ"``.
    """

    descriptors: int
    nbytes: int
    post: float
    seconds: float
    operation: str = "WRITE"


@dataclass
class WireEnds:
    """This process's end of a wire whose other end is a process of its own. :func:`wire_ends` makes it.

    Attributes:
        end: this process's end of NIXL, which knows the other one.
        mine: memory here.
        theirs: address of the memory there, on a device of the same number.
        clock: function that returns seconds; tests replace it.
    """

    end: NixlEnd
    mine: Memory
    theirs: int
    clock: Callable[[], float] = time.perf_counter

    def post(self, number: int, nbytes: int, operation: str, *, same: bool = False) -> tuple[float, float]:
        """Post a list of rows in random order. Return the seconds until the call returned, and until the end.

        Args:
            number: rows.
            nbytes: bytes of each.
            operation: ``"WRITE"`` or ``"READ"``.
            same: whether the rows are the first ones in order, as in every call before: slots that are used again.

        Raises:
            TransferError: NIXL reports a failure, or no end for half a minute.
        """
        mine, rows, handles = self.mine, NBYTES // nbytes, list[Any]()
        try:
            with self.end.calling(f"cannot move a list of {number} descriptors") as nixl:
                for name, start in (("NIXL_INIT_AGENT", mine.address), (FAR, self.theirs)):
                    at = (np.arange(rows) if same else ORDER.permutation(rows))[:number] * nbytes
                    table = np.stack([start + at, np.full(number, nbytes), np.full(number, mine.number)], axis=1)
                    handles.append(nixl.prep_xfer_dlist(name, table, mine.kind))
                every = np.arange(number, dtype=np.int32)
                handles.insert(0, nixl.make_prepped_xfer(operation, handles[0], every, handles[1], every, b""))
                begun = self.clock()
                state = nixl.transfer(handles[0])
                posted = self.clock() - begun
                while state == "PROC" and self.clock() - begun < PATIENCE:
                    state = nixl.check_xfer_state(handles[0])
                seconds = self.clock() - begun
        finally:
            self.end.release(*handles)
        if state != "DONE":
            raise TransferError(f"NIXL says {state!r} of a list of {number} descriptors of {nbytes} bytes")
        return posted, seconds

    def latency(self) -> float:
        """Return the seconds until the other process sees a note: half of there and back, the fastest of ten.

        A slower one waits for a core of the CPU, which is not the wire's cost.

        Raises:
            TransferError: no note came back.
        """
        taken = []
        for _ in range(PINGS + WARM_PINGS):
            begun = self.clock()
            self.end.tell(FAR, PING)
            while not self.end.notes():
                if self.clock() - begun > PATIENCE:
                    raise TransferError("the other process does not answer a note")
            taken.append(self.clock() - begun)
        return statistics.quantiles(taken[WARM_PINGS:], n=10)[0] / 2


@contextmanager
def wire_ends(device: str) -> Iterator[WireEnds]:
    """Start the other process, with memory of the same device, and connect to it. It ends with the context.

    Raises:
        PathError: NIXL is not installed; or the other process refuses.
        TransferError: the other process does not start.
    """
    mine = Memory(device, NBYTES)
    with ExitStack() as stack, redirect_stdout(sys.stderr):  # NIXL would write its log between the words of an answer
        end = stack.enter_context(closing(NixlEnd(NEAR, {"pool": mine.layout}, None, ("UCX",), progress_thread=False)))
        other = OtherProcess(echo, device, NBYTES, NEAR, end.metadata())  # which opens this end
        stack.callback(other.close)
        metadata, address = other.offered
        end.add(FAR, metadata)
        yield WireEnds(end, mine, address)


def echo(stack: ExitStack, pipe: Connection[Any, Any], device: str, nbytes: int, near: str, metadata: bytes) -> None:
    """Be the far end of a wire, with memory that NIXL registers, which answers each note."""
    memory = Memory(device, nbytes)
    end = stack.enter_context(closing(NixlEnd(FAR, {"pool": memory.layout}, None, ("UCX",), progress_thread=False)))
    pipe.send((end.metadata(), memory.address))
    end.add(near, metadata)
    while not pipe.poll(LOOK_SECONDS):  # until it is closed
        for _, note in end.notes():
            if note == PING:
                end.tell(near, PONG)


def measured(ends: WireEnds, seconds: float, tell: Progress) -> list[Posted]:
    """Time lists of several counts and sizes. Cases take turns, since a shared machine drifts.

    Args:
        ends: the ends of the wire.
        seconds: seconds after which no further round begins; every case has at least one sample.
        tell: function that is called with the share that is done.
    """
    cases = [(number, size, operation) for size in SIZES for number in COUNTS for operation in OPERATIONS
             if number * size <= NBYTES]  # fmt: skip
    rounds, begun = list[list[tuple[float, float]]](), time.perf_counter()
    while len(rounds) < 2 or (len(rounds) <= SAMPLES and time.perf_counter() - begun < seconds):
        rounds.append([ends.post(*case) for case in cases])
        tell(len(rounds) / (SAMPLES + 1), f"round {len(rounds)} of lists")
    medians = np.median(rounds[1:], axis=0).tolist()  # the first round warms up
    return [Posted(number, size, post, whole, operation)
            for (number, size, operation), (post, whole) in zip(cases, medians, strict=True)]  # fmt: skip


def slot_bytes(ends: WireEnds) -> dict[int, float]:
    """Time writes of slots that are used again and again. Return the seconds for each byte, by bytes of a slot.

    A small slot stays in the caches of the CPU, so its bytes may cost less than those of a large message.
    """
    taken = {size: [ends.post(1, size, "WRITE", same=True)[1] for _ in range(SAMPLES + 2)] for size in SLOT_SIZES}
    return {size: statistics.median(times[2:]) / size for size, times in taken.items()}


def fitted_wire(base: WireProfile, posts: Sequence[Posted]) -> WireProfile:
    """Fit the costs of messages to lists that were timed, by least squares of relative errors.

    Args:
        base: profile with all that is not fitted.
        posts: lists of at least three different counts and sizes.

    >>> posts = [Posted(n, b, 1e-5 + n * 4e-6 + n * b * 2e-10, 1e-5 + n * 4e-6 + n * b * 2e-10)
    ...          for n in (1, 100, 10000) for b in (100, 10000)]
    >>> made = fitted_wire(default_wire("DRAM"), posts)
    >>> made.overlaps, round(made.descriptor * 1e6, 3), round(1e-9 / made.byte, 3), round(made.post * 1e6, 3)
    (False, 4.0, 5.0, 10.0)
    """
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
    device, wires = "cpu" if wire.memory == "DRAM" else "cuda:0", {True: list[WireProfile](), False: []}
    for size, byte in sorted(slots.items()):
        ring = ring_for(device, replace(wire, how="calibrated", slot_nbytes=size))
        wires[ring.nbytes == size].append(replace(
            wire, slot_nbytes=size, slot_byte=max(byte - wire.message / size, 0.1 * byte),
            slots=min(wire.slots, slots_of_a_peer(ring)),
        ))  # fmt: skip
    return best_slot(LARGE, wires[True] or wires[False])


# Packed transfers, and the copies of their slots.


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
def packed_ends(device: str) -> Iterator[tuple[Any, KVLayout, KVLayout]]:
    """Start a process with memory of the same device, and meet its agent over NIXL. It ends with the context.

    Yields:
        The peer, a layout of this process, and one of the peer's.

    Raises:
        PathError: NIXL is not installed; or the other process refuses.
        TransferError: the other process does not start.
    """
    import torch

    from kvplan.agents.agent import Agent

    geometry = Geometry("push", "contiguous", BLOCK // 2, 2 * BLOCKS, 2)
    flat = torch.ones(geometry.nbytes, dtype=torch.uint8, device=device)
    ((name, mine),) = pools(flat, [geometry]).items()
    with ExitStack() as stack:
        agent = stack.enter_context(Agent("near packed end", {"pool": mine}, transports=BY_NIXL, slots=SLOTS))
        other = PoolOwner(device, geometry.nbytes, [geometry], BY_NIXL, slots=SLOTS)
        stack.callback(other.close)
        peer = agent.meet(other.card())
        other.ask(agent.card())
        yield peer, mine, peer.layouts[name]


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
    rng, found = np.random.default_rng(0), []

    def seconds(plan: Any, rest: float = 0.0) -> float:
        time.sleep(rest)
        begun = clock()
        peer.submit(plan, way="packed").synchronize(PATIENCE)
        return clock() - begun

    for pull in (True, False):
        program = compile(theirs, mine) if pull else compile(mine, theirs)
        short, long = program.plan([1], [2]), program.plan(rng.permutation(BLOCKS), rng.permutation(BLOCKS))
        seconds(long)  # compiles, and greets
        single = statistics.median(seconds(short, REST_SECONDS) for _ in range(SHORT_SAMPLES))
        many = statistics.median(seconds(long) for _ in range(LONG_SAMPLES))
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
    fits = []
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
            fits.append(CopyCosts(*relative(counts, [one.wall for one in times.values()])))
    return fits[0], fits[1]
