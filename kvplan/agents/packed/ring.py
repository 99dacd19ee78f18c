"""The ring of this process, its memory and its slots: it gathers into some, and peers write to the others."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from kvplan.base.values import quoted
from kvplan.cost.wire import WireProfile
from kvplan.cuda.device import Device
from kvplan.cuda.reach import ordinal_of
from kvplan.errors import KVPlanError, PathError
from kvplan.plan.packing import GRAIN
from kvplan.plan.row_plans import Memory, layout_of

LEAST_SLOT = 4096  # bytes
MOST_SLOTS = 1 << 16  # of a ring
HOST_RING, GPU_RING = 128 << 20, 512 << 20  # most bytes of a ring whose slots have the size of a profile
LEAST_HOST_SLOTS, LEAST_GPU_SLOTS = 16, 8  # of such a ring, so that several peers share it


class Slots(NamedTuple):
    """The ring of an agent.

    Attributes:
        number: number of its slots.
        nbytes: bytes of a slot.
    """

    number: int
    nbytes: int


HOST_SLOTS, GPU_SLOTS = Slots(24, 4 << 20), Slots(16, 32 << 20)


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
    """The slots of this process, in memory that is freed with this object.

    Args:
        device: ``"cpu"``, or a GPU such as ``"cuda:0"``; its memory comes from ``cuMemAlloc``, which other processes
            and network cards can map.
        slots: its slots, whose bytes are a multiple of 256, so that kernels move wide words.

    Attributes:
        memory: the memory.
        place: where it is.
        layout: a layout over the whole ring.
        out: free slots to gather into: three of eight.
        into: free slots for chunks that come.
        gathers: number of slots to gather into, free or not.

    Raises:
        KVPlanError: the device is neither the CPU nor a GPU of CUDA, or has not so much memory.

    >>> ring = Ring("cpu", Slots(32, 1 << 12))
    >>> ring.place.slots, ring.out, ring.address(1) - ring.address(0)
    (32, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 4096)
    """

    def __init__(self, device: str, slots: Slots) -> None:
        number, nbytes = slots
        try:
            self.memory = _allocate(device, number * nbytes)
        except (KVPlanError, MemoryError, ValueError) as error:
            raise PathError(f"{device} has no {number * nbytes:,} bytes for a ring: {error}") from error
        self.place = Place(self.memory.data_ptr(), number, nbytes, device)
        self.layout = layout_of([self.memory])
        self.gathers = slots_to_gather(number)
        self.out, self.into = list(range(self.gathers)), list(range(self.gathers, number))

    def address(self, slot: int) -> int:
        """Return the address of a slot."""
        return self.place.address + slot * self.place.slot_nbytes


def _allocate(device: str, nbytes: int) -> Memory:
    if device == "cpu":
        pages = np.zeros(nbytes + GRAIN, np.uint8)  # of huge pages, if there are any
        return Memory(-(-pages.ctypes.data // GRAIN) * GRAIN, nbytes, device, pages)
    gpu = Device(ordinal_of(device))
    with gpu.current():
        address = gpu.allocate(nbytes)
    return Memory(address, nbytes, device, _GpuPages(gpu, address))


class _GpuPages:
    """Memory of a GPU, which is freed with this object."""

    def __init__(self, gpu: Device, address: int) -> None:
        weakref.finalize(self, _free, gpu, address).atexit = False


def _free(gpu: Device, address: int) -> None:
    with gpu.current():
        gpu.free(address)


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


def checked_slots(slots: object) -> Slots | None:
    """Return a ring; raise KVPlanError if it is not (slots, bytes of a slot).

    >>> checked_slots((8, 1 << 20))
    Slots(number=8, nbytes=1048576)
    """
    if slots is None:
        return None
    if not isinstance(slots, tuple) or len(slots) != 2 or not all(type(each) is int for each in slots):
        raise KVPlanError(f"slots is {quoted(slots)}; give (number of slots, bytes of a slot), or None")
    number, nbytes = slots
    if not 2 <= number <= MOST_SLOTS or nbytes < LEAST_SLOT or nbytes % GRAIN:
        raise KVPlanError(
            f"slots is {slots}; a ring has from 2 to {MOST_SLOTS:,} slots, of at least {LEAST_SLOT:,} bytes each, and "
            f"a multiple of {GRAIN}"
        )
    return Slots(number, nbytes)
