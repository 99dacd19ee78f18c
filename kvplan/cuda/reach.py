"""The memory that a GPU reaches, according to its driver: pinned ranges of the host, and memory of other GPUs."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from kvplan.cuda.device import (
    ACCESS_FLAGS,
    DEVICE_POINTER,
    HOST_MEMORY,
    MEMORY_TYPE,
    RANGE_SIZE,
    RANGE_START,
    Device,
)
from kvplan.cuda.ipc.openings import mapped_on
from kvplan.layout.address_ranges import stretches
from kvplan.layout.components import Region
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.descriptors import Seams
from kvplan.plan.plan import Plan

NO_ACCESS, READ_ONLY = 0, 1  # values of ACCESS_FLAGS
_OPENED = "memory of another process at {:#x} was opened for cuda:{}"


class Facts(NamedTuple):
    """Facts of a layout's memory that an executor needs before it moves bytes.

    Attributes:
        device: the device of the memory.
        pageable: the reason why kernels cannot reach host memory, or "".
        seams: ends of registrations inside the memory, ascending.
        unreachable: the reason why kernels cannot reach another GPU's memory, or "".
        unwritable: the reason why kernels can only read another GPU's memory, or "".
    """

    device: str
    pageable: str
    seams: tuple[int, ...]
    unreachable: str = ""
    unwritable: str = ""


def ordinal_of(device: str) -> int:
    """Return the number of a GPU.

    >>> ordinal_of("cuda:3"), ordinal_of("cuda")
    (3, 0)
    """
    return int(device.partition(":")[2] or 0)


def gpus_of(plan: Plan, here: int) -> list[int]:
    """Return the numbers of all GPUs with memory in a plan, after that of the GPU ``here``, which moves it."""
    if len(plan.layouts) == 1 and plan.direction != "device":  # as most plans
        return [here]
    numbers = {ordinal_of(layout.device) for pair in plan.layouts for layout in pair if layout.device != "cpu"}
    return [here, *sorted(numbers - {here})]


class Reach:
    """The facts of layouts. The driver is called once per layout, but every time while kernels cannot reach its memory.

    Pageable memory may be pinned before the next plan, and the memory of another GPU may be mapped.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        # By the id of a layout, which is faster than its equality.
        self._known: dict[int, tuple[weakref.ref[KVLayout], Facts]] = {}

    def facts(self, layout: KVLayout) -> Facts:
        """Return the facts of a layout with real addresses. The device is current."""
        key = id(layout)
        entry = self._known.get(key)
        if entry is not None and entry[0]() is layout:
            return entry[1]
        device = layout.device
        pageable, seams = "", []
        if device == "cpu":
            # Only the stretches that the layout touches are checked: each process pins only its own share of a pool.
            touched = stretches(layout.components)
            starts = [first for first, _ in touched]
            for region in layout.regions:
                for first, last in touched[max(bisect_right(starts, region.address) - 1, 0) :]:
                    if first >= region.end:
                        break
                    why, ends = self._walk(region, max(region.address, first), min(region.end, last))
                    pageable = pageable or why
                    seams += ends
        unreachable, unwritable = self._of_peer(layout)
        facts = Facts(device, pageable, tuple(sorted(set(seams))), unreachable, unwritable)
        if not pageable and not unreachable and not unwritable:
            self._known[key] = (weakref.ref(layout, lambda _: self._known.pop(key, None)), facts)
        return facts

    def _of_peer(self, layout: KVLayout) -> tuple[str, str]:
        """Enable access to another GPU's memory. Return why kernels cannot reach it, and why not write it; or ""."""
        for region in layout.regions if layout.device.startswith("cuda") else ():
            mapped = mapped_on(region.address)
            if mapped is not None:  # access was enabled when it was opened; another GPU would fault
                right = f"let an executor of cuda:{mapped} move it"
                return (
                    "" if mapped == self._device.ordinal else f"{_OPENED.format(region.address, mapped)}; {right}",
                    "",
                )
        if not layout.device.startswith("cuda") or ordinal_of(layout.device) == self._device.ordinal:
            return "", ""
        why = self._device.enable_peer(ordinal_of(layout.device))
        if why:
            return why, ""
        unwritable, here = "", f"cuda:{self._device.ordinal}"
        for region in layout.regions:
            for address in (region.address, region.end - 1):
                # Memory of cuMemMap and of memory pools names the GPUs that reach it. Old drivers lack the attribute.
                access, held = self._device.pointer(address, ACCESS_FLAGS), f"memory of {layout.device} at {address:#x}"
                if access == NO_ACCESS:
                    right = "its allocator must give access (cuMemSetAccess, cuMemPoolSetAccess), or allocate without "
                    return f"{held} is not mapped for {here}; {right}expandable segments", ""
                if access == READ_ONLY:
                    unwritable = f"{held} is mapped for {here} to be read only; let the executor of its own GPU pull"
        return "", unwritable

    def seams(self, plan: Plan) -> Seams:
        """Return the seams of a plan: the seams of its layouts, and the ends of registrations."""
        facts = self.facts
        if not any(facts(src).seams or facts(dst).seams for src, dst in plan.layouts):
            return plan.seams
        found = [[facts(layout).seams for layout in side] for side in zip(*plan.layouts, strict=True)]
        return Seams(
            *(
                np.union1d(told, np.array([seam for seams in side for seam in seams], dtype=np.int64))
                for told, side in zip(plan.seams, found, strict=True)
            )
        )

    def _walk(self, region: Region, first: int, last: int) -> tuple[str, list[int]]:
        """Visit all registrations of a range. Return why some memory is pageable, or "", and the ends inside it."""
        ask = self._device.pointer
        at, seams = first, []
        while at < last:
            if ask(at, MEMORY_TYPE) != HOST_MEMORY:
                return f"host memory at {at:#x} (of [{region.address:#x}, {region.end:#x})) is not pinned", []
            if (mapped := ask(at, DEVICE_POINTER)) != at:
                return f"host memory at {at:#x} has another address on the GPU ({mapped or 0:#x})", []
            start, nbytes = ask(at, RANGE_START), ask(at, RANGE_SIZE)
            if not start or not nbytes or start + nbytes <= at:  # the driver gives no range: check the last byte
                if ask(last - 1, MEMORY_TYPE) != HOST_MEMORY:
                    return f"host memory at {last - 1:#x} is not pinned", []
                break
            at = start + nbytes
            if at < last:
                seams.append(at)
        return "", seams
