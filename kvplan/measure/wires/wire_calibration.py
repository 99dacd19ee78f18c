"""Calibrate a wire: measure lists, notes, and the copies of packing, and fit the costs of a profile to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np

from kvplan.agents.packed.ring import Slots, ring_for, slots_of_a_peer
from kvplan.base.version import __version__
from kvplan.cost.model import NS
from kvplan.cost.store import find_for
from kvplan.cost.wires.wire_model import Crossing, best_slot
from kvplan.cost.wires.wire_profile import CopyCosts, WireProfile, default_wire, wire_name
from kvplan.errors import KVPlanError
from kvplan.execute.executor import Executor
from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.calibration.fit import fit
from kvplan.measure.timing import Progress, silent
from kvplan.measure.wires.packed_times import packed_ends, packed_times, with_protocol
from kvplan.measure.wires.wire_posts import Posted, measured, slot_bytes, wire_ends
from kvplan.plan.copy_program import compile  # noqa: A004

SECONDS = 20.0
# If the call that posts takes more than half as long for a byte as the whole transfer, the CPU that posts moves bytes.
BY_CPU = 0.5
# A large transfer, for which the size of a slot is chosen: 1 GiB in blocks of 1 MiB, and in runs of 8 KiB.
LARGE = Crossing(1 << 30, 1 << 10, 1 << 17, 1 << 17, 1 << 10)
COPY_NBYTES, COPY_RUNS, COPY_SAMPLES = 8 << 20, (512, 4 << 10, 64 << 10, 1 << 20), 5


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
        KVPlanError: the two memories are of different kinds, or the other process does not start.
        TransferError: NIXL reports a failure.
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
    memory = "DRAM" if device == "cpu" else "VRAM"
    made = f"kvplan {__version__}, {datetime.now(UTC):%Y-%m-%d}"
    base = replace(default_wire(memory), wire=wire_name("UCX"), how="calibrated", made=made, latency=latency,
                   gather=gather, scatter=scatter, note="")  # fmt: skip
    return with_slots(with_protocol(fitted_wire(base, posts), protocol), slots), posts


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
    alone = {size: max(byte - wire.message / size, 0.1 * byte) for size, byte in slots.items()}
    rings = {size: _ring_of(wire, size) for size in alone}
    fitting = [size for size in alone if rings[size].nbytes == size] or alone
    counts = {size: min(wire.slots, slots_of_a_peer(ring)) for size, ring in rings.items()}
    sized = (replace(wire, slot_nbytes=size, slot_byte=alone[size], slots=counts[size]) for size in sorted(fitting))
    return best_slot(LARGE, sized)


def _ring_of(wire: WireProfile, slot_nbytes: int) -> Slots:
    """Return the ring that an agent makes after a calibration with slots of this size."""
    device = "cpu" if wire.memory == "DRAM" else "cuda:0"
    return ring_for(device, replace(wire, how="calibrated", slot_nbytes=slot_nbytes))


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
    features = [(1.0, float(one.descriptors), float(one.descriptors * one.nbytes)) for one in posts]
    calls = fit(features, [one.post for one in posts], [1 / one.post for one in posts])
    whole = fit(features, [one.seconds for one in posts], [1 / one.seconds for one in posts])
    if calls[2] > BY_CPU * whole[2]:
        return replace(base, overlaps=False, post=whole[0], descriptor=whole[1], message=0.0, byte=whole[2])
    return replace(base, overlaps=True, post=calls[0], descriptor=calls[1], message=whole[1], byte=whole[2])


def _kernel_copies(device: str) -> tuple[CopyCosts, CopyCosts]:
    kernel = find_for(int(device.partition(":")[2] or 0)).costs["device"]["kernel"]
    fixed, run, byte = (NS * kernel.seconds[term] for term in ("fixed", "run", "byte"))
    costs = CopyCosts(max(NS * kernel.wall["fixed"], fixed), run, byte)
    return costs, costs


def _host_copies(clock: Callable[[], float] = time.perf_counter) -> tuple[CopyCosts, CopyCosts]:
    """Measure gather and scatter in host memory: runs of several sizes, to and from a contiguous slot."""
    slot = np.ones(COPY_NBYTES, dtype=np.uint8)
    pool = np.ones(2 * COPY_NBYTES, dtype=np.uint8)
    found = []
    with Executor("cpu") as executor:
        for gather in (True, False):
            features, seconds = [], []
            for run in COPY_RUNS:
                runs = COPY_NBYTES // run
                rows = KVLayout.from_tensors("block dim", pool.reshape(runs, 2 * run)[:, :run])
                packed = KVLayout.from_tensors("block dim", slot.reshape(runs, run))
                program = compile(rows, packed) if gather else compile(packed, rows)
                for count in (max(runs // 16, 1), runs):
                    plan = program.plan(np.arange(count), np.arange(count))
                    features.append((1.0, float(count), float(count * run)))
                    seconds.append(_best(executor, plan, clock))
            found.append(CopyCosts(*fit(features, seconds, [1 / one for one in seconds])))
    return found[0], found[1]


def _best(executor: Executor, plan: object, clock: Callable[[], float]) -> float:
    taken = []
    for _ in range(COPY_SAMPLES):
        begun = clock()
        executor.submit(plan).synchronize()  # type: ignore[arg-type]
        taken.append(clock() - begun)
    return float(np.median(taken))
