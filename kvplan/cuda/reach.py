"""Which host memory a GPU reaches, as its driver knows it: what is pinned, and where registrations end."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from kvplan.cuda.device import DEVICE_POINTER, HOST_MEMORY, MEMORY_TYPE, RANGE_SIZE, RANGE_START, Device
from kvplan.layout.address_ranges import stretches
from kvplan.layout.components import Region
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.descriptors import Seams
from kvplan.plan.plan import Plan


class Facts(NamedTuple):
    """Facts of a layout's memory that an executor needs before it moves bytes.

    Attributes:
        device: where its memory is.
        pageable: why kernels cannot reach it, or "".
        seams: ends of registrations inside it, ascending.
    """

    device: str
    pageable: str
    seams: tuple[int, ...]


class Reach:
    """Asks the driver once a layout. Memory that was not pinned is asked for again: it may have been since."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # By identity, which is cheaper than equality.
        self._known: dict[int, tuple[weakref.ref[KVLayout], Facts]] = {}

    def facts(self, layout: KVLayout) -> Facts:
        """Find the facts of a layout of real addresses; the device is current."""
        key = id(layout)
        entry = self._known.get(key)
        if entry is not None and entry[0]() is layout:
            return entry[1]
        device = layout.device
        pageable, seams = "", []
        if device == "cpu":
            # What lies far between two may be pinned or not: of a pool that processes share, each pins its own.
            touched = stretches(layout.components)
            starts = [first for first, _ in touched]
            for region in layout.regions:
                for first, last in touched[max(bisect_right(starts, region.address) - 1, 0) :]:
                    if first >= region.end:
                        break
                    why, ends = self._walk(region, max(region.address, first), min(region.end, last))
                    pageable = pageable or why
                    seams += ends
        facts = Facts(device, pageable, tuple(sorted(set(seams))))
        if not pageable:
            self._known[key] = (weakref.ref(layout, lambda _: self._known.pop(key, None)), facts)
        return facts

    def seams(self, plan: Plan) -> Seams:
        """Seams of a plan: those of its layouts, and the ends of registrations, which layouts do not tell."""
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
        """From registration to registration: why not all is pinned, or "", and where they end."""
        ask = self._device.pointer
        at, seams = first, []
        while at < last:
            if ask(at, MEMORY_TYPE) != HOST_MEMORY:
                return f"host memory at {at:#x} (of [{region.address:#x}, {region.end:#x})) is not pinned", []
            if (mapped := ask(at, DEVICE_POINTER)) != at:
                return f"host memory at {at:#x} has another address on the GPU ({mapped or 0:#x})", []
            start, nbytes = ask(at, RANGE_START), ask(at, RANGE_SIZE)
            if not start or not nbytes or start + nbytes <= at:  # the driver does not say how far: ask for the end
                if ask(last - 1, MEMORY_TYPE) != HOST_MEMORY:
                    return f"host memory at {last - 1:#x} is not pinned", []
                break
            at = start + nbytes
            if at < last:
                seams.append(at)
        return "", seams
