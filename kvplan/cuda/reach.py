"""The memory that a GPU reaches, according to its driver: pinned ranges of the host, and memory of other GPUs."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from kvplan.cuda.device import Device
from kvplan.cuda.driver import ACCESS_FLAGS, HOST_MEMORY, MEMORY_TYPE, RANGE_SIZE, RANGE_START
from kvplan.cuda.ipc import Opening
from kvplan.layout.address_ranges import stretches
from kvplan.layout.components import Region
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.descriptors import Seams
from kvplan.plan.plan import Plan

NO_ACCESS, READ_ONLY = 0, 1  # values of ACCESS_FLAGS


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


def route_of(plan: Plan, here: str) -> str:
    """Return the way of a plan's bytes, as the executor of the GPU ``here`` sees it.

    Between GPUs it is ``"pull"`` if some of the sources are another GPU's memory, otherwise ``"push"``.
    """
    if plan.direction != "device":
        return plan.direction
    for side, route in ((0, "pull"), (1, "push")):
        for pair in plan.layouts:
            if pair[side].device != here and ordinary(pair[side].device) != here:
                return route
    return "device"


def ordinary(device: str) -> str:
    """Return the name of a device with its number."""
    return device if ":" in device else f"{device}:0"


class Reach:
    """The facts of layouts. The driver is called once per layout and GPU; each time, while a GPU does not reach it.

    Pageable memory may be pinned before the next plan, and the memory of another GPU may be mapped.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def facts(self, layout: KVLayout) -> Facts:
        """Return the facts of a layout with real addresses. The device is current."""
        facts: Facts | None = layout.reached.get(self._device.context)
        if facts is None:
            pageable, seams = self._of_host(layout) if layout.device == "cpu" else ("", ())
            unreachable, unwritable = self._of_peer(layout) if layout.device != "cpu" else ("", "")
            facts = Facts(layout.device, pageable, seams, unreachable, unwritable)
            if not pageable and not unreachable and not unwritable:
                layout.reached[self._device.context] = facts
        return facts

    def _of_host(self, layout: KVLayout) -> tuple[str, tuple[int, ...]]:
        """Return why kernels cannot reach host memory, or "", and the ends of registrations inside it.

        Only the stretches that the layout touches are checked: each process pins only its own share of a pool.
        """
        seams = set[int]()
        touched = stretches(layout.components)
        starts = [first for first, _ in touched]
        for region in layout.regions:
            for first, last in touched[max(bisect_right(starts, region.address) - 1, 0) :]:
                if first >= region.end:
                    break
                why = self._walk(region, max(region.address, first), min(region.end, last), seams)
                if why:
                    return why, ()
        return "", tuple(sorted(seams))

    def _walk(self, region: Region, first: int, last: int, seams: set[int]) -> str:
        """Visit all registrations of a range, and add their ends inside it. Return why some memory is pageable."""
        ask, at = self._device.pointer, first
        while at < last:
            start, nbytes = ask(at, RANGE_START), ask(at, RANGE_SIZE)
            if ask(at, MEMORY_TYPE) != HOST_MEMORY or not start or not nbytes:
                return f"host memory at {at:#x} (of [{region.address:#x}, {region.end:#x})) is not pinned"
            at = start + nbytes
            if at < last:
                seams.add(at)
        return ""

    def _of_peer(self, layout: KVLayout) -> tuple[str, str]:
        """Enable access to another GPU's memory. Return why kernels cannot reach it, and why not write it; or ""."""
        here = f"cuda:{self._device.ordinal}"
        opened = [region.owner for region in layout.regions if isinstance(region.owner, Opening)]
        for opening in opened:  # access was enabled when it was opened; another GPU would fault
            if opening.ordinal != self._device.ordinal:
                there = f"cuda:{opening.ordinal}"
                what = f"memory of another process at {opening.address:#x} was opened for {there}"
                return f"{what}; let an executor of {there} move it", ""
        if opened or ordinal_of(layout.device) == self._device.ordinal:
            return "", ""
        why = self._device.enable_peer(ordinal_of(layout.device))
        if why:
            return why, ""
        unwritable = ""
        for region in layout.regions:
            for address in (region.address, region.end - 1):
                # Memory of cuMemMap and of memory pools names the GPUs that reach it. Old drivers lack the attribute.
                access, what = self._device.pointer(address, ACCESS_FLAGS), f"memory of {layout.device} at {address:#x}"
                if access == NO_ACCESS:
                    right = "its allocator must give access (cuMemSetAccess, cuMemPoolSetAccess), or allocate without "
                    return f"{what} is not mapped for {here}; {right}expandable segments", ""
                if access == READ_ONLY:
                    unwritable = f"{what} is mapped for {here} to be read only; let the executor of its own GPU pull"
        return "", unwritable

    def seams(self, plan: Plan) -> Seams:
        """Return the seams of a plan: the seams of its layouts, and the ends of registrations."""
        facts = self.facts
        if not any(facts(src).seams or facts(dst).seams for src, dst in plan.layouts):
            return plan.seams
        sides = zip(plan.seams, zip(*plan.layouts, strict=True), strict=True)
        return Seams(
            *(np.union1d(known, np.concatenate([facts(layout).seams for layout in side])).astype(np.int64)
              for known, side in sides)
        )  # fmt: skip
