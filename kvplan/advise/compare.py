"""Compare two layouts: find the first place where they stop being contiguous together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvplan.base.numbers import number_ranges
from kvplan.draw.copies import Place, locate_byte, run_words, unit_runs
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.places import first_from
from kvplan.layout.strides import extent
from kvplan.program.matching import Pair, heads_of
from kvplan.program.passes import Passes

OUTSIDE = ("block", "unit", "end")
AXES = ("block", "layer", "part", "token", "head", "byte")


class Onward(NamedTuple):
    """The content of one side that follows the end of a run.

    Attributes:
        axis: the axis along which content continues: ``layer``, ``part``, ``token``, ``head`` or ``byte``; ``unit`` or
            ``block`` if the next content is outside the unit; ``end`` if no content follows.
        gap_nbytes: bytes without content before the next content.
        lacked: whether the other side lacks that content.
        text: all of this in words.
    """

    axis: str
    gap_nbytes: int
    lacked: bool
    text: str


class Break(NamedTuple):
    """The first place in the destination's unit at which two layouts stop being contiguous together.

    Attributes:
        nbytes: bytes of the run that ends at this place.
        start: coordinates of the run's first byte.
        holds: coordinates of the run in words.
        src, dst: the content that follows on each side.
        axis: the axis that ends the run; None if the run is the whole unit.
    """

    nbytes: int
    start: Place
    holds: str
    src: Onward
    dst: Onward
    axis: str | None


def first_break(src: KVLayout, dst: KVLayout, compiled: Passes) -> Break:
    """Find the first place where two layouts stop being contiguous together.

    Args:
        src, dst: the layouts.
        compiled: the result of the compiler's passes.

    >>> from kvplan.program.passes import passes
    >>> sizes = {"block": 4, "token": 16, "head": 2, "dim": 128}
    >>> hnd, nhd = (KVLayout.from_spec({"notation": n, "sizes": sizes})
    ...             for n in ("block head token dim", "block token head dim"))
    >>> end = first_break(hnd, nhd, passes(hnd.geometry, nhd.geometry))
    >>> end.nbytes, end.holds, end.src.text, end.dst.text, end.axis
    (256, 'layer 0, part kv, token 0, head 0', 'goes on with token 1', 'goes on with head 1', 'token')
    """
    program, pairs = compiled.program, compiled.pairs
    runs = unit_runs(program)
    runs = runs[:, np.argsort(runs[1], kind="stable")]
    here, there, nbytes = runs[:, 0].tolist()
    start = locate_byte(src.components, pairs, "src", here)[0]
    sides = (("src", src, here, program.src_units), ("dst", dst, there, program.dst_units))
    onward = [_onward(layout, pairs, side, range(at, at + nbytes), start, units) for side, layout, at, units in sides]
    axis = None
    if nbytes != program.unit_nbytes:
        # The axis along which the source goes on, or the destination, if the source leaves the unit there.
        inside = [side.axis for side in onward if side.axis not in OUTSIDE]
        following = [side.axis for side in onward if side.lacked] + inside
        axis = following[0] if following else _differing(
            start, locate_byte(src.components, pairs, "src", int(runs[0, 1]))[0])  # fmt: skip
    return Break(nbytes, start, run_words(src.components, pairs, here, nbytes), onward[0], onward[1], axis)


def _onward(
    layout: KVLayout, pairs: Sequence[Pair], side: str, run: range, start: Place, units: int
) -> Onward:  # fmt: skip
    """Return the content that follows a run on one side; ``start`` is its first byte."""
    following = (first_from(component, run.stop) for component in layout.components)
    at = min((address for address in following if address is not None), default=None)
    if at is None:
        return Onward("end", 0, lacked=False, text="ends there")
    place, pair = locate_byte(layout.components, pairs, side, at)
    form = (getattr(pair, side) if pair else layout.component(place.layer, place.part)).form
    moved = [head for each in pairs if (each.layer, each.part) == place[:2] for head in each.heads]
    lacked = form.headed and bool(moved) and place.head not in moved
    axis = "head" if lacked else _differing(start, place)
    text = f"{axis} {getattr(place, axis)}" + ", which the other side lacks" * lacked
    if axis == "token" and place.token >= extent(form.token) // units:
        axis, text = "unit", "the next unit of its block"
    elif axis == "token" and form.opaque:
        axis, text = "subblock", f"sub-block {place.token}"
    gap = at - run.stop
    regions = {max(region.address for region in layout.regions if region.address <= byte) for byte in (run.start, at)}
    if gap and len(regions) > 1:
        return Onward(axis, gap, lacked, f"ends a tensor: {text} is in another")
    return Onward(axis, gap, lacked, f"skips {gap:,} bytes up to {text}" if gap else f"goes on with {text}")


def _differing(start: Place, later: Place) -> str:
    """Return the outermost axis along which two places differ."""
    return next((axis for axis in AXES if getattr(start, axis) != getattr(later, axis)), "byte")


def untouched(compiled: Passes) -> Iterator[tuple[str, str]]:
    """Yield the side (``src`` or ``dst``) that holds heads that the other side lacks, and a line of text on them."""
    for heads, src, dst in heads_of(compiled.pairs, headed=True):
        for side, held in (("src", src), ("dst", dst)):
            rest = [head for head in held if head not in heads]
            if rest:
                yield side, f"heads {number_ranges(rest)} stay where they are"
