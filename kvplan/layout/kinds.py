"""What each kind of layer of a layout holds: extents of the axes, element types, and the words for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvplan.base.numbers import number_ranges
from kvplan.layout.components import Built, Component
from kvplan.layout.notation import AXES, notations
from kvplan.layout.slicing import Heads, joined_heads
from kvplan.layout.strides import extent
from kvplan.layout.tensors import itemsize_of


class Content(NamedTuple):
    """What one part of one layer holds in each block.

    Attributes:
        part: name of the part.
        slots: token slots, or sub-blocks if ``opaque``.
        opaque: whether blocks move whole.
        heads: global numbers of the heads; None without a head axis.
        dim: elements of one (token, head).
        dtype: name of the element type, ``""`` if it is not known.
    """

    part: str
    slots: int
    opaque: bool
    heads: Heads | None
    dim: int
    dtype: str

    @property
    def sizes(self) -> dict[str, int]:
        """Extents by axis; a block that moves whole has no axis of slots."""
        slots = {"token": self.slots} if not self.opaque else {"subblock": self.slots} if self.slots > 1 else {}
        return slots | ({} if self.heads is None else {"head": len(self.heads)}) | {"dim": self.dim}


Kinds = dict[tuple[Content, ...], list[int]]


def kinds(layout: Built) -> Kinds:
    """Return the contents of each kind of layer, in the order of parts, with the global numbers of its layers.

    >>> from kvplan import KVLayout
    >>> spec = {"notation": "layer: block token head dim", "dtype": "bf16"}
    >>> cache = KVLayout.from_spec({"layouts": [
    ...     spec | {"layers": layers, "sizes": {"layer": 2, "block": 4, "token": 16, "head": heads, "dim": dim}}
    ...     for layers, heads, dim in (([0, 1], 8, 256), ([2, 3], 2, 512))]})
    >>> {layers[0]: content.sizes for (content,), layers in kinds(cache.built).items()}
    {0: {'token': 16, 'head': 8, 'dim': 256}, 2: {'token': 16, 'head': 2, 'dim': 512}}
    """
    layers: dict[int, dict[str, list[Component]]] = {}
    for component in layout.components:
        layers.setdefault(component.layer, {}).setdefault(component.part, []).append(component)
    known: dict[tuple[object, ...], Content] = {}  # most layers share their forms
    found: Kinds = {}
    for layer, parts in sorted(layers.items()):
        contents = []
        for part, held in parts.items():
            key = part, held[0].dtype, *(id(component.form) for component in held)
            if key not in known:
                known[key] = _content(held, layout.dtype)
            contents.append(known[key])
        found.setdefault(tuple(contents), []).append(layer)
    return found


def _content(held: Sequence[Component], dtype: str) -> Content:
    """Return what the components of one (layer, part) hold; they have equal forms, each with heads of its own."""
    first, form = held[0], held[0].form
    itemsize = itemsize_of(first.dtype or dtype)
    nbytes = extent(form.dim)
    return Content(
        first.part, extent(form.token), form.opaque,
        joined_heads(component.form.heads for component in held) if form.headed else None,
        nbytes // itemsize if nbytes % itemsize == 0 else nbytes, first.dtype,
    )  # fmt: skip


def sizes(layout: Built) -> dict[str, int]:
    """Return the extents of the axes of a notation, in elements for ``dim``; without axes on which contents differ."""
    axes = frozenset[str]().union(*(notation.axes for notation in notations(layout.notation)))
    found = kinds(layout)
    outer = {"layer": sum(map(len, found.values())), "kv": min(2, len(layout.parts)), "block": layout.num_blocks}
    inner = [content.sizes for contents in found for content in contents]
    extents = {axis: {size[axis] for size in inner if axis in size} for axis in axes - outer.keys()}
    same = outer | {axis: some.pop() for axis, some in extents.items() if len(some) == 1}
    if layout.opaque and "subblock" in axes:
        same.setdefault("subblock", layout.block_tokens)
    return {axis: same[axis] for axis in AXES if axis in axes and axis in same}


def words(layout: Built) -> Iterator[str]:
    """Yield, for each kind of layer, its layers and the sizes in which contents differ; nothing if all are alike."""
    found, common = kinds(layout), sizes(layout)
    every = [content for contents in found for content in contents]
    mixed, ranges = " + " in layout.dtype, {content.heads for content in every if content.heads}
    numbered = len(ranges) > 1 and any(heads[0] for heads in ranges)
    if len({content._replace(part="", dtype="") for content in every}) == len(found) == 1 and not mixed:
        return
    for contents, layers in found.items():
        alike: dict[str, list[str]] = {}
        for content in contents:
            own = [f"{axis}={size}" for axis, size in content.sizes.items() if axis not in common]
            own += [f"heads {number_ranges(content.heads)}"] if numbered and content.heads else []
            own += [content.dtype] if mixed and content.dtype else []
            own += ["moves whole"] if content.opaque and not layout.opaque else []
            alike.setdefault(" ".join(own), []).append(content.part)
        held = ", ".join(" ".join([*parts, text]).rstrip() for text, parts in alike.items())
        yield held if len(found) == 1 else f"layer{'s' * (len(layers) > 1)} {number_ranges(layers, ',')}: {held}"
