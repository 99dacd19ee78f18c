"""Compare two layouts: find the first place where they stop being contiguous together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvplan.base.numbers import number_ranges
from kvplan.draw.program import Place, locate_byte
from kvplan.layout.inverse import first_from
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import extent
from kvplan.program.matching import Pair, heads_of
from kvplan.program.passes import Passes

OUTSIDE = ("block", "unit", "end")
AXES = {"block": "block", "layer": "layer", "part": "part", "token": "token", "head": "head", "dim": "byte"}


class Onward(NamedTuple):
    """The content of one side that follows the end of a run.

    Attributes:
        axis: the axis along which content continues: ``layer``, ``part``, ``token``, ``head`` or ``dim``; ``unit`` or
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
        holds: content of the run in words.
        src, dst: the content that follows on each side.
        axis: the axis that ends the run; None if the run is the whole unit.
    """

    nbytes: int
    start: Place
    holds: str
    src: Onward
    dst: Onward
    axis: str | None


def first_break(src: KVLayout, dst: KVLayout, made: Passes) -> Break:
    """Find the first place where two layouts stop being contiguous together.

    Args:
        src, dst: the layouts.
        made: the result of the compiler's passes.

    >>> from kvplan.program.passes import passes
    >>> sizes = {"block": 4, "token": 16, "head": 2, "dim": 128}
    >>> hnd, nhd = (KVLayout.from_spec({"notation": n, "sizes": sizes})
    ...             for n in ("block head token dim", "block token head dim"))
    >>> found = first_break(hnd, nhd, passes(hnd.geometry, nhd.geometry))
    >>> found.nbytes, found.holds, found.src.text, found.dst.text, found.axis
    (256, 'one (token, head) row', 'goes on with the next token', 'goes on with the next head', 'token')
    """
    program, pairs = made.program, made.pairs
    runs = np.concatenate(
        [group.packed + np.array([[group.src_base], [group.dst_base], [0]]) for group in program.groups], axis=1
    )
    runs = runs[:, np.argsort(runs[1], kind="stable")]
    at = {"src": int(runs[0, 0]), "dst": int(runs[1, 0])}
    nbytes = int(runs[2, 0])
    start, last = (locate_byte(src.components, pairs, "src", at["src"] + byte)[0] for byte in (0, nbytes - 1))
    units = {"src": program.src_units, "dst": program.dst_units}
    onward = [_onward(layout, pairs, side, (at[side], at[side] + nbytes), (start, last), units[side])
              for side, layout in (("src", src), ("dst", dst))]  # fmt: skip
    axis = None
    if nbytes != program.unit_nbytes:
        # The axis along which the source goes on, or the destination, if the source leaves the unit there.
        inside = [side.axis for side in onward if side.axis not in OUTSIDE]
        following = [side.axis for side in onward if side.lacked] + inside
        later = locate_byte(src.components, pairs, "src", int(runs[0, 1]))[0]
        axis = following[0] if following else _differing(start, later)
    return Break(nbytes, start, _holds(start, last, nbytes, pairs), onward[0], onward[1], axis)


def _onward(
    layout: KVLayout, pairs: Sequence[Pair], side: str, run: tuple[int, int], ends: tuple[Place, Place], units: int
) -> Onward:
    """Return the content that follows a run on one side; ``ends`` are its first and last byte."""
    following = (first_from(component, run[1]) for component in layout.components)
    at = min((address for address in following if address is not None), default=None)
    if at is None:
        return Onward("end", 0, lacked=False, text="ends there")
    place, pair = locate_byte(layout.components, pairs, side, at)
    component = getattr(pair, side) if pair else layout.component(place.layer, place.part)
    moved = [head for each in pairs if (each.layer, each.part) == place[:2] for head in each.heads]
    lacked = component.form.headed and bool(moved) and place.head not in moved
    axis = "head" if lacked else _differing(ends[0], place)
    if lacked:
        name = f"head {place.head}, which the other side lacks"
    elif axis == "token" and place.token >= extent(component.form.token) // units:
        axis, name = "unit", "the next unit of its block"
    elif axis == "token" and component.form.opaque:
        axis, name = "subblock", f"sub-block {place.token:,} of its block"
    else:
        name = _named(axis, ends[1], place)
    gap = at - run[1]
    regions = [max(region.address for region in layout.regions if region.address <= byte) for byte in (run[0], at)]
    if gap and regions[0] != regions[1]:
        return Onward(axis, gap, lacked, f"ends a tensor: {name} is in another")
    return Onward(axis, gap, lacked, f"skips {gap:,} bytes up to {name}" if gap else f"goes on with {name}")


def _differing(start: Place, later: Place) -> str:
    """Return the outermost axis along which two places differ."""
    return next((axis for axis, name in AXES.items() if getattr(start, name) != getattr(later, name)), "dim")


def _named(axis: str, last: Place, place: Place) -> str:
    if axis == "part":
        return place.part.upper() if place.part in ("k", "v") else f"part {place.part!r}"
    if axis == "dim":
        return f"byte {place.byte:,} of the same row"
    number = getattr(place, axis)
    return f"the next {axis}" if number == getattr(last, axis) + 1 else f"{axis} {number:,}"


def _holds(start: Place, last: Place, nbytes: int, pairs: Sequence[Pair]) -> str:
    """Describe the content of a run by the axes of which it holds all coordinates."""
    pair = next(pair for pair in pairs if (pair.layer, pair.part) == start[:2])
    form = pair.src.form
    layers, parts = sorted({pair.layer for pair in pairs}), list(dict.fromkeys(pair.part for pair in pairs))
    across = sorted((layers.index(start.layer), layers.index(last.layer)))
    along = sorted((parts.index(start.part), parts.index(last.part)))
    counts = {"layer": across[1] - across[0] + 1, "part": along[1] - along[0] + 1,
              "token": last.token - start.token + 1, "head": last.head - start.head + 1}  # fmt: skip
    inside = {pair[:2] for pair in pairs if across[0] <= layers.index(pair.layer) <= across[1]}
    count = sum(along[0] <= parts.index(part) <= along[1] for _, part in inside)
    whole = count * max(counts["token"], 1) * max(counts["head"], 1)
    row = "(token, head) row" if form.headed or pair.dst.form.headed else "token row"
    if form.opaque and pair.dst.form.opaque:
        row = "sub-block" if form.subblocks > 1 or pair.dst.form.subblocks > 1 else "block"
    if whole * pair.nbytes != nbytes:
        return f"part of one {row}: {nbytes:,} of {pair.nbytes:,} bytes" if whole == 1 else "no whole number of rows"
    if whole == 1:
        return f"one {row}"
    both = counts["part"] == 2 and {start.part, last.part} == {"k", "v"}
    names = {"part": "K and V" if both else f"{counts['part']} parts"}
    if form.opaque:
        names["token"] = f"{counts['token']:,} sub-blocks"
    if count != counts["layer"] * counts["part"]:  # not every layer holds every part
        names["part"], counts["layer"], counts["part"] = f"{count:,} parts of layers", 1, count
    words = [names.get(axis, f"{steps:,} {axis}s") for axis, steps in counts.items() if steps > 1]
    return f"{' x '.join(words)}, whole rows"


def untouched(made: Passes) -> Iterator[tuple[str, str]]:
    """Yield the side (``src`` or ``dst``) that holds heads that the other side lacks, and a line of text on them."""
    for heads, src, dst in heads_of(made.pairs, headed=True):
        for side, held in (("src", src), ("dst", dst)):
            rest = [head for head in held if head not in heads]
            if rest:
                yield side, f"heads {number_ranges(rest)} stay where they are"
