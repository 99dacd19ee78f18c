"""Programs as they travel: the layouts of both sides, from which the other end compiles the same program.

Rows of NIXL's lists have no layout: both sides are then any memory of a device, and the id of a row is its address.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.cached_property import cached_property
from kvplan.errors import TransferError
from kvplan.layout.components import Region
from kvplan.layout.dump import built_from_dump, document_of
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.plan.plan import ById
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
    kvplan.errors.TransferError: rows from a peer lie outside the memory that is offered on cpu
    """

    def __init__(self, layouts: Iterable[KVLayout] = ()) -> None:
        self.layouts = tuple(layouts)

    @cached_property
    def _regions(self) -> list[Region]:
        return sorted((r for layout in self.layouts for r in layout.regions), key=lambda r: (r.address, -r.nbytes))

    @cached_property
    def _ranges(self) -> dict[str, Int64Array]:
        """By device, disjoint ranges (first, end), ascending."""
        found: dict[str, list[list[int]]] = {}
        for region in self._regions:
            ranges = found.setdefault(region.device, [])
            if ranges and region.address <= ranges[-1][1]:
                ranges[-1][1] = max(ranges[-1][1], region.end)
            else:
                ranges.append([region.address, region.end])
        return {device: np.array(ranges, np.int64) for device, ranges in found.items()}

    def on(self, device: str) -> tuple[KVLayout, ...]:
        """Return the layouts on a device."""
        return tuple([layout for layout in self.layouts if layout.device == device])

    def check_rows(self, addresses: Int64Array, nbytes: int, device: str) -> None:
        """Check that rows lie in this memory; raise TransferError if not."""
        ranges = self._ranges.get(device)
        if ranges is not None and addresses.size:
            at = np.searchsorted(ranges[:, 0], addresses, side="right") - 1
            if bool((at >= 0).all()) and bool((addresses + nbytes <= ranges[at, 1]).all()):
                return
        raise TransferError(f"rows from a peer lie outside the memory that is offered on {device}")

    def own(self, layout: KVLayout) -> KVLayout:
        """Return a layout that a peer has sent, over this memory; raise TransferError if it reaches outside."""
        regions, starts = [], [region.address for region in self._regions]
        for region in layout.regions:
            some = self._regions[: bisect_right(starts, region.address)]
            mine = [one for one in some if one.device == region.device and region.end <= one.end]
            if not mine or (region.writable and not any(one.writable for one in mine)):
                raise TransferError(f"{layout!r} from a peer is not all in the memory that is offered")
            best = max(mine, key=lambda one: (one.writable, one.address))
            regions.append(
                replace(region, pinned=best.pinned, owner=best.owner, held=best.held, pool=best.pool, recorded=False)
            )
        return KVLayout(layout.built._replace(regions=tuple(regions)))


NOTHING = Offer()


class Known(NamedTuple):
    """A program that a peer has sent.

    Attributes:
        program: the program.
        own: layouts of this process that hold its units; none for rows, which are checked chunk by chunk.
        device: the device of this process's side.
    """

    program: ById
    own: tuple[KVLayout, ...]
    device: str


def program_body(program: ById, side: int) -> bytes:
    """Return a program as the body of a message.

    Args:
        program: the program.
        side: the side of the process that sends it.
    """
    layouts, more = (program.src, program.dst), dict[str, Any]()
    if isinstance(program, CopyProgram):
        more["layouts"] = [document_of(layout.built) for layout in layouts]
    else:
        group = program.program.groups[0]
        more["rows"] = [group.nbytes, group.src.step()]
        more["devices"] = [layout.device for layout in layouts]
    return zlib.compress(json.dumps({"side": side, **more}).encode(), 1)


def read_program(body: bytes, offer: Offer) -> Known:
    """Compile a program that a peer has sent; raise KVPlanError if it cannot be, or names other memory than offered."""
    sent = json.loads(zlib.decompress(body))
    mine = 1 - sent["side"]
    if "rows" in sent:
        sides = [far_memory(device) for device in sent["devices"]]
        return Known(RowProgram.of_rows(sides[0], sides[1], *sent["rows"]), (), sent["devices"][mine])
    layouts = [KVLayout(built_from_dump(document)) for document in sent["layouts"]]
    layouts[mine] = own = offer.own(layouts[mine])
    if mine and not own.writable:
        raise TransferError(f"{own!r} from a peer is read-only")
    return Known(compile_quietly(layouts[0], layouts[1], reinterpret=True), (own,), own.device)


def far_memory(device: str) -> KVLayout:
    """Return a layout that stands for any memory of a device of another process."""
    return KVLayout.from_spec(
        {
            "notation": "block dim",
            "dtype": "uint8",
            "device": device,
            "address": 4096,
            "sizes": {"block": 1, "dim": FAR},
        }
    )
