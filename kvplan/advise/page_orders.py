"""List the orders whose page holds several parts, each in the other side's own order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

from kvplan.advise.contents import Candidate, parts_held
from kvplan.advise.mirrored import SPLIT, Dims, Held, atoms_of, dims_of, held_of, outer_extents, units_of
from kvplan.advise.order_specs import sizes_of_page
from kvplan.layout.kvlayout import KVLayout

OUTER = ("block", "layer", "kv")


def pages(mine: KVLayout, other: KVLayout, tokens: int) -> Iterator[Candidate]:
    """Yield the orders in which one page of a block, or of a layer of a block, holds all parts.

    Parts that lie in one page of the other side have the order of its bytes. Contents of one shape are not tried,
    because one notation holds them in one allocation.

    Args:
        mine: the side that may change.
        other: the side that does not change.
        tokens: token slots per block of the orders; ignored if all content is opaque.
    """
    unit = gcd(tokens, other.block_tokens)
    held = tuple(held_of(mine, other))
    units = outer_extents(mine, other, tokens, held)
    if len(held) < 2 or units is None:
        return
    block_tokens = other.block_tokens if all(one.content.opaque for one in held) else tokens
    ordered = _by_address([part for one in held for part in _apart(one, other, unit)])
    lead = min(2 + len(tuple(units_of(one.content, units))) for one in ordered)  # block, its units, layer
    known: set[tuple[object, int]] = set()
    for deep in (True, False):
        made = tuple((one.content, dims_of(one, unit, OUTER, units, deep=deep)) for one in ordered)
        if not all(dims for _, dims in made):
            continue
        for shared in _shared([dims for _, dims in made], lead):
            candidate = Candidate(made, block_tokens, SPLIT + len(known), shared)
            if (made, shared) not in known and sizes_of_page(candidate, mine) is not None:
                known.add((made, shared))
                yield candidate


def _apart(one: Held, other: KVLayout, unit: int) -> Iterator[Held]:
    """Yield K and V as two contents, unless they lie inside the tokens, heads or bytes of one another."""
    inside = max((stride for stride, _, _ in atoms_of(one.first.form, unit)), default=0)
    if not one.content.kv or 0 < one.kv_stride < inside:
        yield one
        return
    for part in parts_held(one.content):
        first = next(component for component in other.components if component.part == part)
        yield Held(one.content._replace(part=part, kv=False), first, one.layer_stride, 0)


def _by_address(held: Sequence[Held]) -> list[Held]:
    """Return contents in the order of their bytes, as far as they lie in one page; pages keep their order."""
    together: list[list[Held]] = []
    for one in held:
        stride = min((stride for _, stride in one.first.form.block), default=0)
        near = (some for some in together if abs(some[0].first.address - one.first.address) < stride)
        page = next(near, None)
        if page is None:
            together.append([one])
        else:
            page.append(one)
    return [one for page in together for one in sorted(page, key=lambda each: each.first.address)]


def _shared(several: Sequence[Dims], lead: int) -> Iterator[int]:
    """Yield how many of the outermost dims all contents may share: through ``layer``, and without it."""
    same = 0
    while same < lead and len({dims[same] for dims in several}) == 1:
        same += 1
    if same > 1 and several[0][same - 1][0] == "layer":
        yield same
        same -= 1
    if same and all(len(dims) > same for dims in several):
        yield same
