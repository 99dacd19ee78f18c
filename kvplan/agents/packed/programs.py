"""Programs as they travel: the layouts of both sides, from which the other end compiles the same program.

Rows of NIXL's lists have no layout: both sides are then any memory of a device, and the id of a row is its address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.process import cached_property
from kvplan.errors import TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.spec import built_from_dump, document_of
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.plan.plan import PlannedBy
from kvplan.plan.row_plans import RowProgram

FAR = 1 << 46  # bytes of a layout that stands for any memory of a device


class Offer:
    """Memory of this process that peers may name.

    Args:
        layouts: layouts over it.

    >>> from kvplan.plan.row_plans import Memory, layout_of
    >>> pool = np.zeros(256, np.uint8)
    >>> offer = Offer([layout_of([Memory(pool.ctypes.data, 256, "cpu", pool)])])
    >>> offer.check_rows(np.array([pool.ctypes.data + 192]), 64, "cpu")
    >>> offer.check_rows(np.array([pool.ctypes.data + 193]), 64, "cpu")
    Traceback (most recent call last):
        ...
    kvplan.errors.TransferError: a peer names memory that is not all in the memory that is offered on cpu
    """

    def __init__(self, layouts: Iterable[KVLayout] = ()) -> None:
        self.layouts = tuple(layouts)

    @cached_property
    def _ranges(self) -> dict[str, Int64Array]:
        """By device, disjoint ranges (first, end), ascending."""
        regions = [region for layout in self.layouts for region in layout.regions]
        joined: dict[str, list[list[int]]] = {}
        for region in sorted(regions, key=lambda region: region.address):
            ranges = joined.setdefault(region.device, [])
            if ranges and region.address <= ranges[-1][1]:
                ranges[-1][1] = max(ranges[-1][1], region.end)
            else:
                ranges.append([region.address, region.end])
        return {device: np.array(ranges, np.int64) for device, ranges in joined.items()}

    def holding(self, layout: KVLayout, *, rows: bool) -> tuple[KVLayout, ...]:
        """Return the layouts over a peer's layout of this memory, or all of its device for rows.

        Raises:
            TransferError: some of it is not offered.
        """
        own = [each for each in self.layouts if each.device == layout.device]
        if not rows:
            regions = layout.regions
            for region in regions:
                self.check_rows(np.array([region.address]), region.nbytes, region.device)
            own = [
                each
                for each in own
                if any(r.address < s.end and s.address < r.end for r in regions for s in each.regions)
            ]
        if not own:
            raise TransferError(f"no memory is offered on {layout.device}")
        return tuple(own)

    def check_rows(self, addresses: Int64Array, nbytes: int, device: str) -> None:
        """Check that rows lie in this memory; raise TransferError if not."""
        ranges = self._ranges.get(device)
        if ranges is not None and addresses.size:
            at = np.searchsorted(ranges[:, 0], addresses, side="right") - 1
            if bool((at >= 0).all()) and bool((addresses + nbytes <= ranges[at, 1]).all()):
                return
        raise TransferError(f"a peer names memory that is not all in the memory that is offered on {device}")


NOTHING = Offer()


def document_of_program(program: PlannedBy, side: int) -> dict[str, Any]:
    """Return a program as a message has it.

    Args:
        program: the program.
        side: the side of the process that sends it.
    """
    layouts = program.src, program.dst
    if isinstance(program, CopyProgram):
        return {"side": side, "layouts": [document_of(layout.built) for layout in layouts]}
    group = program.program.groups[0]
    return {"rows": [group.nbytes, group.src.step()], "devices": [layout.device for layout in layouts]}


class PeerProgram(NamedTuple):
    """A program that a peer has sent.

    Attributes:
        program: the program.
        own: layouts of this process that hold its side; () for rows, whose memory may change.
    """

    program: PlannedBy
    own: tuple[KVLayout, ...] = ()


def read_program(document: dict[str, Any], offer: Offer) -> PeerProgram:
    """Compile a program that a peer has sent; raise KVPlanError if it cannot be, or names other memory than offered."""
    if "rows" in document:
        src, dst = map(far_memory, document["devices"])
        return PeerProgram(RowProgram.of_rows(src, dst, *document["rows"]))
    layouts = [KVLayout(built_from_dump(layout)) for layout in document["layouts"]]
    own = offer.holding(layouts[1 - document["side"]], rows=False)
    return PeerProgram(compile_quietly(layouts[0], layouts[1], reinterpret=True), own)


def far_memory(device: str) -> KVLayout:
    """Return a layout that stands for any memory of a device of another process."""
    sizes = {"block": 1, "dim": FAR}
    spec = {"notation": "block dim", "dtype": "uint8", "device": device, "address": 4096, "sizes": sizes}
    return KVLayout.from_spec(spec)
