"""The ring of this process, its memory and its slots: it gathers into some, and peers write to the others."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.values import integer, quoted
from kvplan.cost.wire import WireProfile
from kvplan.errors import KVPlanError, LayoutError, PathError
from kvplan.plan.packing import GRAIN
from kvplan.plan.row_plans import Memory, layout_of

LEAST_SLOT = 4096  # bytes
MOST_SLOTS = 1 << 16  # of a ring


class Slots(NamedTuple):
    """The ring of an agent.

    Attributes:
        number: number of its slots.
        nbytes: bytes of a slot.
    """

    number: int
    nbytes: int


HOST_SLOTS, GPU_SLOTS = Slots(24, 4 << 20), Slots(16, 32 << 20)
LEAST_GPU_SLOT = 4 << 20  # bytes of a slot of a default ring, where a GPU has little memory left
HOST_RING, GPU_RING = 128 << 20, 512 << 20  # most bytes of a ring whose slots have the size of a profile
LEAST_HOST_SLOTS, LEAST_GPU_SLOTS = 16, 8  # of such a ring, so that several peers share it


class Place(NamedTuple):
    """Where a ring is, for a peer that writes to it.

    Attributes:
        address: address of the first slot.
        slots: number of slots.
        slot_nbytes: bytes of a slot.
        device: ``"cpu"``, or a GPU such as ``"cuda:0"``, as its own process numbers it.
    """

    address: int
    slots: int
    slot_nbytes: int
    device: str


class Ring:
    """The slots of this process.

    Args:
        memory: the memory. What lies before the first multiple of 256, and a rest that makes no slot, are not used.
        slot_nbytes: bytes of a slot; a multiple of 256, so that kernels move wide words.

    Attributes:
        place: where it is.
        layout: a layout over the whole ring.
        out: free slots to gather into: three of eight.
        into: free slots for chunks that come.
        gathers: number of slots to gather into, free or not.

    Raises:
        LayoutError: the memory has less than two slots, or more than 65,536.

    >>> import numpy as np
    >>> pool = np.zeros((32 << 12) + 256, np.uint8)
    >>> ring = Ring(Memory(pool.ctypes.data, pool.nbytes, "cpu", pool), 1 << 12)
    >>> ring.place.slots, ring.out, ring.address(1) - ring.address(0)
    (32, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 4096)
    """

    def __init__(self, memory: Memory, slot_nbytes: int) -> None:
        start, nbytes = memory.data_ptr(), memory.shape[1]
        first = -(-start // GRAIN) * GRAIN
        number = (start + nbytes - first) // slot_nbytes
        if slot_nbytes % GRAIN or not 2 <= number <= MOST_SLOTS:
            raise LayoutError(f"a ring of {nbytes:,} bytes has {number:,} slots of {slot_nbytes:,} bytes")
        self.memory = memory
        self.place = Place(first, number, slot_nbytes, memory.device)
        self.layout = layout_of([memory])
        self.gathers = slots_to_gather(number)
        self.out, self.into = list(range(self.gathers)), list(range(self.gathers, number))

    def address(self, slot: int) -> int:
        """Return the address of a slot."""
        return self.place.address + slot * self.place.slot_nbytes


def slots_to_gather(number: int) -> int:
    """Return how many slots of a ring are for gathers.

    >>> [slots_to_gather(number) for number in (2, 6, 16, 24)]
    [1, 2, 6, 9]
    """
    return max(1, number * 3 // 8)


def slots_of_a_peer(ring: Slots) -> int:
    """Return the slots of a ring that its only peer may write.

    >>> [slots_of_a_peer(Slots(number, 64 << 20)) for number in (8, 16, 24)]
    [4, 9, 14]
    """
    return most_of_a_peer(ring.number - slots_to_gather(ring.number), shared=False)


def most_of_a_peer(slots: int, *, shared: bool) -> int:
    """Return how many of some slots one peer may have: half if there are others, and never all, since it may stall."""
    return max(1, slots // 2 if shared else slots - max(1, slots // 8))


def ring_for(device: str, wire: WireProfile) -> Slots:
    """Return the ring of an agent that was given none: with slots of the size that the wire's calibration has found.

    Args:
        device: device of the ring.
        wire: profile of the wire.

    >>> from dataclasses import replace
    >>> from kvplan.cost.wire import default_wire
    >>> ring_for("cuda:0", default_wire())
    Slots(number=16, nbytes=33554432)
    >>> ring_for("cuda:0", replace(default_wire(), how="calibrated", slot_nbytes=64 << 20))
    Slots(number=8, nbytes=67108864)
    >>> ring_for("cuda:0", replace(default_wire(), how="calibrated", slot_nbytes=1 << 20))
    Slots(number=16, nbytes=1048576)
    """
    host = device == "cpu"
    usual, most, least = (HOST_SLOTS, HOST_RING, LEAST_HOST_SLOTS) if host else (GPU_SLOTS, GPU_RING, LEAST_GPU_SLOTS)
    if wire.how != "calibrated":
        return usual
    nbytes = min(max(wire.slot_nbytes // GRAIN * GRAIN, LEAST_SLOT), most // least)
    return Slots(min(usual.number, most // nbytes), nbytes)


def allocated(device: str, slots: Slots, *, smaller: bool) -> Ring:
    """Allocate a ring; on a GPU that has not so much memory left, one with smaller slots if that is allowed.

    Args:
        device: device of the ring.
        slots: its slots.
        smaller: whether slots may be smaller; they are halved down to 4 MiB.

    Raises:
        KVPlanError: there is no memory.
    """
    while True:
        try:
            return Ring(ring_pages(slots.number * slots.nbytes, device), slots.nbytes)
        except PathError:
            if not smaller or slots.nbytes // 2 < LEAST_GPU_SLOT:
                raise
            slots = slots._replace(nbytes=slots.nbytes // 2 // GRAIN * GRAIN)


def checked_slots(slots: object) -> Slots | None:
    """Return a ring; raise KVPlanError if it is not (slots, bytes of a slot).

    >>> checked_slots((8, 1 << 20))
    Slots(number=8, nbytes=1048576)
    """
    if slots is None:
        return None
    if not isinstance(slots, tuple) or len(slots) != 2:
        raise KVPlanError(f"slots is {quoted(slots)}; give (number of slots, bytes of a slot), or None")
    right = "a ring has from 2 to 65,536 slots"
    number = integer("slots[0]", slots[0], least=2, most=MOST_SLOTS, right=right, error=KVPlanError)
    right = f"a slot has at least {LEAST_SLOT:,} bytes"
    nbytes = integer("slots[1]", slots[1], least=LEAST_SLOT, right=right, error=KVPlanError)
    if nbytes % GRAIN:
        raise KVPlanError(f"slots[1] is {nbytes}; the bytes of a slot are a multiple of {GRAIN}")
    return Slots(number, nbytes)


def ring_pages(nbytes: int, device: str) -> Memory:
    """Allocate memory for a ring. It is freed with the returned object.

    Args:
        nbytes: bytes of the ring.
        device: ``"cpu"``, or a GPU such as ``"cuda:0"``; its memory comes from ``cuMemAlloc``, which other processes
            and network cards can map.

    Raises:
        LayoutError: the host has not so much memory.
        PathError: the device is neither the CPU nor a GPU of CUDA, or the GPU has not so much memory.

    >>> ring_pages(1 << 16, "cpu").shape
    (1, 65536)
    """
    if device == "cpu":
        try:
            pages = np.zeros(nbytes + GRAIN, np.uint8)  # of huge pages, if there are any
        except (MemoryError, ValueError) as error:
            raise LayoutError(f"the host has no {nbytes:,} bytes for a ring: {error}") from error
        return Memory(-(-pages.ctypes.data // GRAIN) * GRAIN, nbytes, device, pages)
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise PathError(f"the ring's device is {device!r}; expected 'cpu', or a GPU such as 'cuda:0'")
    from kvplan.cuda.device import Device

    try:
        gpu = Device(int(number))
        with gpu.current():
            address = gpu.allocate(nbytes)
    except KVPlanError as error:
        raise PathError(f"{device} has no {nbytes:,} bytes for a ring: {error}") from error
    owner = _GpuPages()
    weakref.finalize(owner, _free, gpu, address).atexit = False
    return Memory(address, nbytes, device, owner)


class _GpuPages:
    """Memory of a GPU, which is freed with this object."""


def _free(gpu: Any, address: int) -> None:
    with gpu.current():
        gpu.free(address)


def enter(device: str) -> None:
    """Make the GPU of a ring the calling thread's current device, for a thread of kvplan's own.

    Each submit of the thread then finds it current, which saves 10 to 20 us. If the driver refuses it, each makes it
    current for itself, as always.

    Args:
        device: device of the ring; nothing is done for ``"cpu"``.

    >>> enter("cpu")
    """
    if device != "cpu":
        from kvplan.cuda.device import Device
        from kvplan.cuda.reach import ordinal_of

        with suppress(KVPlanError):
            Device(ordinal_of(device)).enter()
