"""Lay out one page for several parts: values and their scales, each with its own dtype, size and order of axes.

    "block layer | k v: head token dim | k_scale v_scale: head token"

Before the first ``|`` are the axes that all parts share, outermost first; a ``:`` may stand there as in any notation.
Behind it are the parts in the order of their bytes, each with its own axes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import lcm, prod
from typing import Any, NamedTuple

from kvplan.base.quoting import other_case, quoted
from kvplan.errors import LayoutError, NotationError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.notation import Notation, parse
from kvplan.layout.strides import extent
from kvplan.memory.pool_content import Asked, Content, content_of
from kvplan.memory.pool_memory import Tensors, viewed

PARTS = "|"
_DIM = re.compile(r"\([^)]*\)|\S+")  # a dim of a notation


class _Area(NamedTuple):
    """The bytes of one or two parts in a page.

    Attributes:
        content: what it holds, with the notation of the whole pool.
        start: first byte in the page.
        shape: extents of the axes within the page, in elements.
    """

    content: Content
    start: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first byte behind the area."""
        return self.start + prod(self.shape) * self.content.itemsize


def page_of(text: str, like: KVLayout, asked: Asked) -> Tensors:
    """Return the tensors of a pool whose pages hold several parts of ``like``.

    Each part begins at a multiple of the bytes of its elements, and so does each page.

    Args:
        text: the notation, with ``|``.
        like: the layout whose content the pool will hold.
        asked: sizes of the pool.

    Raises:
        NotationError: the notation does not parse.
        LayoutError: parts are missing or differ in the axes that they share, or a size is invalid.
    """
    first, *sections = text.split(PARTS)
    shared = len(_DIM.findall(first.rpartition(":")[2]))
    columns = [sum(len(one) + 1 for one in (first, *sections[:k])) + 1 for k in range(len(sections))]
    named = [_section(text, section, column) for section, column in zip(sections, columns, strict=True)]
    _check_parts(text, [part for parts, _, _ in named for part in parts], like)
    areas: list[_Area] = []
    for parts, dims, column in named:
        whole = _parsed(text, first, dims, column)
        apart = [parts] if "kv" in whole.axes else [(part,) for part in parts]
        for held in (some for each in apart for some in _layers_alike(like.slice(parts=each))):
            content = _content(whole, like, held, asked)
            start = -(-(areas[-1].end if areas else 0) // content.itemsize) * content.itemsize
            areas.append(_Area(content, start, content.shape[shared:]))
    for area in areas[1:]:
        _check_shared(text, shared, areas[0].content, area.content)
    widest = lcm(*(area.content.itemsize for area in areas))
    nbytes = -(-areas[-1].end // widest) * widest
    outer = areas[0].content.shape[:shared]

    def described(memory: Any, seams: Sequence[int] = ()) -> KVLayout:
        return KVLayout.merge([_layout(area, outer, memory, seams) for area in areas])

    geometry = f"{' '.join(text.split())} | {nbytes} bytes a page | {' | '.join(area.content.words for area in areas)}"
    return Tensors((*outer, nbytes), areas[0].content.counts, "uint8", geometry, described)


def _parsed(text: str, first: str, dims: str, column: int) -> Notation:
    """Parse the shared axes and those of a section, which begin at a column of the text; errors show the whole text."""
    try:
        return parse(f"{first} {dims}")
    except NotationError as error:
        at = error.column if error.column <= len(first) + 1 else error.column - len(first) - 2 + column
        raise NotationError(error.problem, text=text, column=at) from error


def _section(text: str, section: str, column: int) -> tuple[tuple[str, ...], str, int]:
    """Return the names of the parts of a section, its axes, and the column of its first axis."""
    names, colon, dims = section.partition(":")
    if not colon or not names.split():
        raise NotationError("behind a '|' stand the names of parts, then ':' and their axes", text=text, column=column)
    if ":" in dims:
        raise NotationError("a second ':'", text=text, column=column + len(names) + 1 + dims.index(":"))
    start = column + len(names) + 1 + len(dims) - len(dims.lstrip())
    return tuple(names.split()), dims.strip(), start


def _check_parts(text: str, named: Sequence[str], like: KVLayout) -> None:
    if twice := [part for k, part in enumerate(named) if part in named[:k]]:
        raise LayoutError(f"{quoted(text)} names part {quoted(twice[0])} twice")
    if unknown := [part for part in named if part not in like.parts]:
        raise LayoutError(
            f"{quoted(text)} names part {quoted(unknown[0])}; like holds {like.parts}"
            f"{other_case(unknown[0], like.parts)}"
        )
    if missing := [part for part in like.parts if part not in named]:
        raise LayoutError(f"{quoted(text)} has no place for part {missing[0]!r} of like; name it, or slice like first")


def _layers_alike(layout: KVLayout) -> list[KVLayout]:
    """Return the layers of one shape together, in the order of their first layers."""
    shapes: dict[object, list[int]] = {}
    for layer in layout.layers:
        held = tuple((c.part, c.form.heads, extent(c.form.dim)) for c in layout.components if c.layer == layer)
        shapes.setdefault(held, []).append(layer)
    return [layout] if len(shapes) == 1 else [layout.slice(layers=layers) for layers in shapes.values()]


def _content(whole: Notation, like: KVLayout, held: KVLayout, asked: Asked) -> Content:
    """Return what the area of one part holds, or of the two halves of a kv axis, in layers of one shape."""
    if asked.layers is not None and held.layers != like.layers:
        raise LayoutError(f"parts {held.parts} lie in layers {held.layers} of like; give no layers=, or slice like")
    heads = asked.heads if held.heads == like.heads else None  # scales without heads, an index with a head of its own
    names = {str(atom) for dim in whole.dims for atom in dim} | whole.axes
    sizes = {name: size for name, size in asked.sizes.items() if name in names}
    tokens = None if held.opaque else asked.block_tokens
    if held.opaque and "subblock" in whole.axes and isinstance(asked.block_tokens, int):
        sizes.setdefault("subblock", held.block_tokens * asked.block_tokens // like.block_tokens)
    return content_of(whole, held, Asked(asked.num_blocks, tokens, asked.layers, heads, sizes))


def _check_shared(text: str, shared: int, first: Content, other: Content) -> None:
    """Check that two parts agree in the axes that they share: those of the first dims, and those left of a colon."""
    atoms = [*first.notation.nesting, *(str(atom) for dim in first.notation.dims[:shared] for atom in dim)]
    shared_axes = {name.partition(".")[0] for name in atoms}
    checks: list[tuple[str, Any, Any]] = [(name, first.extents[name], other.extents[name]) for name in atoms]
    checks += [("layer", first.layers, other.layers)] * ("layer" in shared_axes)
    checks += [("head", first.heads, other.heads)] * ("head" in shared_axes)
    for name, mine, its in checks:
        if mine != its:
            raise LayoutError(
                f"{quoted(text)} shares {name!r}, which is {mine} for part {first.part!r} and {its} for part "
                f"{other.part!r}; write the axis behind the '|', for each part"
            )


def _layout(area: _Area, outer: tuple[int, ...], memory: Any, seams: Sequence[int]) -> KVLayout:
    """Return the layout of one area of all pages."""
    content = area.content

    def view(tensor: Any) -> Any:
        if isinstance(tensor, list):
            return [view(one) for one in tensor]
        return viewed(tensor[..., area.start : area.end], content.dtype, (*outer, *area.shape))

    return KVLayout.from_tensors(
        str(content.notation), view(memory), sizes=content.told, layers=content.layers,
        head_start=content.heads.start, part=content.part, seams=seams,
    )  # fmt: skip
