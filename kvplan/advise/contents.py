"""The contents of a layout's blocks, and orders of their axes that are not compiled yet."""

from __future__ import annotations

from typing import NamedTuple

from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import extent


class Content(NamedTuple):
    """One or two parts of the same shape.

    Attributes:
        part: the name in a spec; if ``kv``, it stands for two parts.
        kv: whether the parts are K and V.
        heads: global numbers of the heads; None if there is no head axis.
        opaque: whether blocks have no token slots.
        nbytes: bytes per (token, head).
    """

    part: str
    kv: bool
    heads: range | None
    opaque: bool
    nbytes: int


class Candidate(NamedTuple):
    """An order of axes that is not compiled yet.

    Attributes:
        dims: for each content, its dims, outermost first: name and extent (the extent of ``dim`` in bytes).
        block_tokens: token slots per block.
        distance: distance from the present order: number of swapped pairs of axes, and 2 for another block size.
        shared: number of outermost dims that all contents share, so that one page holds all of them, in this order; 0
            if each content has an allocation.
    """

    dims: tuple[tuple[Content, tuple[tuple[str, int], ...]], ...]
    block_tokens: int
    distance: int
    shared: int = 0

    @property
    def allocations(self) -> int:
        """Return the number of allocations."""
        return 1 if self.shared else len(self.dims)


def parts_held(one: Content) -> tuple[str, ...]:
    """Return the names of the parts that a content stands for.

    >>> parts_held(Content("scale", True, None, False, 4)), parts_held(Content("index", False, None, True, 132))
    (('k_scale', 'v_scale'), ('index',))
    """
    if not one.kv:
        return (one.part,)
    return ("k", "v") if one.part == "kv" else (f"k_{one.part}", f"v_{one.part}")


def contents_of(layout: KVLayout) -> tuple[Content, ...]:
    """Return the contents of a layout; () if a part differs between layers, because one order cannot hold that."""
    shapes: dict[str, Content] = {}
    for c in layout.components:
        form = c.form
        one = Content(c.part, False, form.heads if form.headed else None, form.opaque, extent(form.dim))  # noqa: FBT003
        if shapes.setdefault(c.part, one) != one:
            return ()
    if len(layout.components) != len(shapes) * len(layout.layers):
        return ()
    found: list[Content] = []
    for part, one in shapes.items():
        half = part.partition("_")
        other = f"{'v' if half[0] == 'k' else 'k'}{half[1]}{half[2]}"
        if half[0] in ("k", "v") and other in shapes and shapes[other]._replace(part=part) == one:
            if half[0] == "k":
                found.append(one._replace(part=half[2] or "kv", kv=True))
        else:
            found.append(one)
    return tuple(found)
