"""Lay out the pages of a pool: the parts and layers in them, each with its own dtype, size and order of axes.

    "block layer kv token head dim"
    "block layer | k v: head token dim | k_scale v_scale: head token"

Without ``|`` all parts are of one size. Layers of several sizes then stand behind each other, behind the dims that all
of them share. With ``|``, the axes before the first one are those that all parts share, outermost first; a ``:`` may
stand there as in any notation. Behind it are the parts in the order of their bytes, each with its own axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from math import lcm, prod
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.numbers import number_ranges
from kvplan.base.values import integer, integers, other_case, quoted
from kvplan.errors import LayoutError, NotationError
from kvplan.layout.build import extents, shape_of
from kvplan.layout.kinds import kinds
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.notation import PARTS, Notation, parse
from kvplan.layout.slicing import Heads
from kvplan.layout.strides import extent
from kvplan.layout.tensors import ITEMSIZE

_DIM = re.compile(r"\([^)]*\)|\S+")  # a dim of a notation
_COMMON = frozenset(("block", "token", "subblock", "kv"))  # axes in which layers of several sizes do not differ

# Short names of dtypes in specs, with their names in torch and numpy.
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64",
    "double": "float64", "byte": "uint8", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip


class Wish(NamedTuple):
    """The sizes of a pool, as :func:`kvplan.allocate` takes them; None stands for the size of ``like``."""

    num_blocks: int | None
    block_tokens: int | None
    layers: Iterable[int] | None
    heads: Heads | None
    sizes: Mapping[str, int]


class Area(NamedTuple):
    """The bytes that parts of one shape take in a page.

    Attributes:
        notation: the notation of these parts in the whole pool.
        extents: extents of its axes and factors, in elements.
        layers, heads: global numbers.
        part: name of the content, as :meth:`kvplan.KVLayout.from_tensors` takes it.
        dtype: name of the element type in torch and numpy.
        shared: number of dims that lie outside the page.
        start: first byte in the page.
    """

    notation: Notation
    extents: dict[str, int]
    layers: tuple[int, ...]
    heads: Heads
    part: str
    dtype: str
    shared: int
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of one tensor, in elements."""
        return shape_of(self.notation, self.extents)

    @property
    def end(self) -> int:
        """The first byte behind the area."""
        return self.start + prod(self.shape[self.shared :]) * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        sized = " ".join(f"{name}={size}" for name, size in sorted(self.extents.items()))
        numbered = f"layers {number_ranges(self.layers)} | heads {number_ranges(self.heads)} | part {self.part}"
        return f"{self.notation} | {sized} | {self.dtype} | {numbered}"


class Pages(NamedTuple):
    """The pages of a pool; each holds all areas.

    Attributes:
        text: the notation as given.
        areas: the areas, in the order of their bytes. Each begins at a multiple of the bytes of its elements.
        nbytes: bytes of a page, a multiple of the bytes of every element.
    """

    text: str
    areas: tuple[Area, ...]
    nbytes: int

    @property
    def outer(self) -> tuple[int, ...]:
        """Extents of the dims outside the pages of one tensor."""
        return self.areas[0].shape[: self.areas[0].shared]

    @property
    def counts(self) -> tuple[int, ...]:
        """Lengths of the nested lists of tensors, outermost first; empty if there is one tensor."""
        return tuple(self.areas[0].extents[axis] for axis in self.areas[0].notation.nesting)

    def __str__(self) -> str:
        """The geometry in words, which processes that share a pool compare."""
        page = [" ".join(self.text.split()), f"{self.nbytes} bytes a page"] if len(self.areas) > 1 else []
        return " | ".join([*page, *map(str, self.areas)])

    def layout(self, memory: Any) -> KVLayout:
        """Return the layout of tensors of bytes, nested in lists."""

        def view(tensor: Any, area: Area) -> Any:
            if isinstance(tensor, list):
                return [view(each, area) for each in tensor]
            rows = tensor.reshape((*self.outer, self.nbytes))[..., area.start : area.end]
            return _viewed(rows, area.dtype, area.shape)

        areas = [
            KVLayout.from_tensors(
                str(area.notation), view(memory, area), layers=area.layers, head_start=area.heads[0], part=area.part,
                sizes={k: v for k, v in area.extents.items() if k != "kv" and k not in area.notation.nesting},
            )
            for area in self.areas
        ]  # fmt: skip
        if len(areas) == 1:
            return areas[0]
        whole = KVLayout.merge(areas)
        return KVLayout(whole.built._replace(notation=" ".join(self.text.split())), tensors=whole.tensors)


def _viewed(memory: Any, dtype: str, shape: Sequence[int]) -> Any:
    """Return a view of bytes, whose last dim is contiguous, as an array or tensor of a type and shape."""
    if not isinstance(memory, np.ndarray):
        import torch

        return memory.view(getattr(torch, dtype, torch.uint8)).view(tuple(shape))
    try:
        element = np.dtype(dtype)
    except TypeError:  # bfloat16, fp8: an unsigned integer of equal width
        element = np.dtype(f"u{ITEMSIZE[dtype]}")
    return memory.view(element).reshape(shape)


def pages(text: str, like: KVLayout, wish: Wish) -> Pages:
    """Return the pages of a pool for the content of ``like``.

    Raises:
        NotationError: the notation does not parse.
        LayoutError: the notation cannot hold ``like``, parts differ in the axes that they share, or a size is invalid.
    """
    if PARTS not in text:
        whole = parse(text)
        alike = layers_alike(like) if "layer" not in whole.nesting else [like]
        inside = takewhile(lambda dim: {atom.axis for atom in dim} <= _COMMON, whole.dims)
        contents, shared = [(whole, some) for some in alike], len(list(inside)) if len(alike) > 1 else 0
    else:
        contents = list(_sections(text, like))
        shared = len(_DIM.findall(text.partition(PARTS)[0].rpartition(":")[2]))
    areas: list[Area] = []
    for notation, some in contents:
        area = _area(notation, like, some, wish)
        itemsize = ITEMSIZE[area.dtype]
        start = -(-(areas[-1].end if areas else 0) // itemsize) * itemsize
        areas.append(area._replace(shared=shared, start=start))
        _check_shared(text, areas[0], areas[-1])
    widest = lcm(*(ITEMSIZE[area.dtype] for area in areas))
    return Pages(text, tuple(areas), -(-areas[-1].end // widest) * widest)


def layers_alike(layout: KVLayout) -> list[KVLayout]:
    """Return the layers of each shape together, in the order of their first layers; all, if parts of layers differ."""
    shapes: dict[object, list[int]] = {}
    parts = set()
    for contents, layers in kinds(layout.built).items():
        shapes.setdefault(tuple((c.part, c.heads, c.dim, c.dtype) for c in contents), []).extend(layers)
        parts.add(tuple(content.part for content in contents))
    if len(shapes) == 1 or len(parts) > 1:
        return [layout]
    return [layout.slice(layers=sorted(layers)) for layers in shapes.values()]


def _sections(text: str, like: KVLayout) -> Iterator[tuple[Notation, KVLayout]]:
    """Yield the notation and the content of each area of a text with ``|``."""
    first, *sections = text.split(PARTS)
    column = len(first) + 2
    named: list[str] = []
    for section in sections:
        names, colon, dims = section.partition(":")
        if not colon or not names.split():
            problem = "behind a '|' stand the names of parts, then ':' and their axes"
            raise NotationError(problem, text=text, column=column)
        if ":" in dims:
            raise NotationError("a second ':'", text=text, column=column + len(names) + 1 + dims.index(":"))
        parts = names.split()
        for part in parts:
            if part in named:
                raise LayoutError(f"{quoted(text)} names part {quoted(part)} twice")
            if part not in like.parts:
                hint = other_case(part, like.parts)
                raise LayoutError(f"{quoted(text)} names part {quoted(part)}; like holds {like.parts}{hint}")
            named.append(part)
        start = column + len(section) - len(dims.lstrip())
        try:
            whole = parse(f"{first} {dims.strip()}")
        except NotationError as error:  # show the whole text
            at = error.column if error.column <= len(first) + 1 else error.column - len(first) - 2 + start
            raise NotationError(error.problem, text=text, column=at) from error
        for some in [parts] if "kv" in whole.axes else [[part] for part in parts]:
            yield from ((whole, content) for content in layers_alike(like.slice(parts=some)))
        column += len(section) + 1
    if missing := [part for part in like.parts if part not in named]:
        raise LayoutError(f"{quoted(text)} has no place for part {missing[0]!r} of like; name it, or slice like first")


def _check_shared(text: str, first: Area, other: Area) -> None:
    """Check that two areas agree in the axes that they share: those outside the page, and those left of a colon."""
    atoms = [*first.notation.nesting, *(str(atom) for dim in first.notation.dims[: first.shared] for atom in dim)]
    axes = {name.partition(".")[0] for name in atoms}
    checks: list[tuple[str, Any, Any]] = [(name, first.extents[name], other.extents[name]) for name in atoms]
    checks += [("layer", first.layers, other.layers)] * ("layer" in axes)
    checks += [("head", first.heads, other.heads)] * ("head" in axes)
    for name, mine, its in checks:
        if mine != its:
            here, there = (
                f"part {area.part!r}" + f" of layers {number_ranges(area.layers)}" * (first.part == other.part)
                for area in (first, other)
            )
            what = f"{name!r}, which is {mine} for {here} and {its} for {there}"
            raise LayoutError(f"{quoted(text)} shares {what}; write the axis behind the '|', for each part")


# ---- one area --------------------------------------------------------------------------------------------------------


def _area(whole: Notation, like: KVLayout, own: KVLayout, wish: Wish) -> Area:
    """Return the area of ``own``, a slice of ``like``, in a notation."""
    if "subblock" in whole.axes and not own.opaque:
        raise LayoutError(f"'{whole}' has opaque sub-blocks, and like has token slots: write token instead of subblock")
    if wish.layers is not None and own.layers != like.layers:
        raise LayoutError(f"parts {own.parts} lie in layers {own.layers} of like; give no layers=, or slice like")
    _check_content(like, own)
    part, nbytes = _content_name(whole, own), extent(own.components[0].form.dim)
    dtype, layers = _dtype(own, nbytes), _layers(wish.layers, own)
    # Scales have no heads, and an index has a head of its own.
    heads = wanted_heads(wish.heads, own) if own.heads == like.heads else own.heads
    names = {str(atom) for dim in whole.dims for atom in dim} | whole.axes
    sizes = {name: size for name, size in wish.sizes.items() if own is like or name in names}
    tokens = None if wish.block_tokens is None else counted("block_tokens", wish.block_tokens)
    axes = {
        "layer": len(layers),
        "block": like.num_blocks if wish.num_blocks is None else counted("num_blocks", wish.num_blocks),
        "token": tokens or own.block_tokens,
        "head": len(heads),
        "dim": nbytes // ITEMSIZE[dtype],
    }
    if own.opaque:
        if tokens is None or own is not like:
            axes["token"] = 1
        scaled = own.block_tokens if tokens is None or own is like else own.block_tokens * tokens // like.block_tokens
        axes["subblock"] = sizes.setdefault("subblock", scaled) if "subblock" in whole.axes else own.block_tokens
    for axis, size in axes.items():
        if size != 1 and axis not in whole.axes:
            hint = ": give sizes={'subblock': ...}, the number of opaque blocks in one block of the pool"
            hint *= axis == "token" and own.opaque
            raise LayoutError(f"'{whole}' has no {axis!r} axis, and must hold {size} of them{hint}")
    known = extents(whole, {axis: size for axis, size in axes.items() if axis in whole.axes} | sizes)
    for axis, size in axes.items():
        atoms = [str(atom) for atom in whole.factors(axis)]
        if atoms and prod(known[name] for name in atoms) != size:
            raise LayoutError(f"sizes make {axis} {prod(known[name] for name in atoms)}; the pool needs {size}")
    return Area(whole, known, layers, heads, part, dtype, 0)


def _check_content(like: KVLayout, own: KVLayout) -> None:
    """Check that one notation can hold the parts of ``own`` in all its layers."""
    sizes = {extent(c.form.dim) for c in own.components}
    heads = {extent(c.form.head) for c in own.components}
    if len(sizes) > 1 or len(heads) > 1:
        problem = (
            f"parts {own.parts} hold {sorted(sizes)} bytes per (token, head) and {sorted(heads)} heads, and one "
            "notation holds parts of one size"
        )
    elif len({(c.layer, c.part) for c in own.components}) != len(own.layers) * len(own.parts):
        problem = f"not every layer of {own} holds every part"
    else:
        return
    raise LayoutError(f"{problem}; write one page, as in {example(like)!r}, or allocate each part from its own slice")


def example(like: KVLayout) -> str:
    """Return a notation of one page for all parts of a layout.

    >>> spec = {"layer": 2, "block": 8, "token": 16}
    >>> kv = KVLayout.from_spec({"notation": "layer block kv token head dim", "sizes": spec | {"head": 2, "dim": 64}})
    >>> own = {"notation": "block token dim", "sizes": {"block": 8, "token": 16, "dim": 8}, "part": "index"}
    >>> example(KVLayout.merge([kv, KVLayout.from_spec(own | {"address": 1 << 40})]))
    'block | k: layer token head dim | v: layer token head dim | index: layer token dim'
    """
    alone = len(kinds(like.built)) == 1
    areas = []
    for part in like.parts:
        form = like.slice(parts=(part,)).components[0].form
        slots = ["token"] * (not form.opaque) + ["subblock"] * (form.subblocks > 1)
        areas.append(f"{part}: {' '.join(['layer'] * (not alone) + slots + ['head'] * form.headed + ['dim'])}")
    return " | ".join(["block layer" if alone else "block", *areas])


def _content_name(notation: Notation, like: KVLayout) -> str:
    """Return the name of the content, as :meth:`kvplan.KVLayout.from_tensors` takes it."""
    pair, name = like.parts, like.parts[0][1:]
    if "kv" not in notation.axes:
        if len(pair) != 1:
            raise LayoutError(f"'{notation}' has no kv axis, and must hold parts {pair}; write kv, as in (kv dim)")
        return pair[0]
    if pair != (f"k{name}", f"v{name}"):
        hint = next((hint for hint in (other_case(part, ("k", "v")) for part in pair) if hint), "")
        raise LayoutError(f"'{notation}' has a kv axis for parts ('k', 'v'), and like holds {pair}; leave out kv{hint}")
    return name.removeprefix("_") or "kv"


def _dtype(like: KVLayout, nbytes: int) -> str:
    """Return the pool's element type, in torch and numpy: the type of ``like`` if it divides rows, else uint8."""
    own = {component.dtype or like.dtype for component in like.components}  # parts of merged layouts have their own
    dtype = own.pop() if len(own) == 1 else ""
    itemsize = ITEMSIZE.get(dtype)
    return _DTYPES.get(dtype, dtype) if itemsize and nbytes % itemsize == 0 else "uint8"


def _layers(layers: Iterable[int] | None, like: KVLayout) -> tuple[int, ...]:
    """Return the global numbers of the pool's layers, ascending."""
    if layers is None:
        return like.layers
    right = "give the global numbers of the pool's layers, each once"
    numbers = integers("layers", layers, least=0, right=right) if isinstance(layers, Iterable) else ()
    if not numbers or len(set(numbers)) != len(numbers):
        raise LayoutError(f"layers is {quoted(layers)}; {right}")
    if missing := sorted(set(like.layers) - set(numbers)):
        raise _too_few("layers", missing, sorted(numbers))
    return tuple(sorted(numbers))


def _too_few(name: str, own: Sequence[int], wanted: Sequence[int]) -> LayoutError:
    return LayoutError(
        f"like holds {name} {number_ranges(own)}, and the pool's {name} are {number_ranges(wanted)}; slice like first"
    )


def counted(name: str, value: Any) -> int:
    """Return a number of blocks or tokens, which is at least 1."""
    return integer(name, value, least=1, right="it is an integer, and a pool has at least one")


def wanted_heads(heads: Heads | None, like: KVLayout) -> Heads:
    """Return the global numbers of the pool's heads."""
    if heads is None:
        if isinstance(like.heads, tuple):
            raise LayoutError(f"like holds heads {number_ranges(like.heads)}; give the pool's as a range: heads=...")
        return like.heads
    if not isinstance(heads, range) or heads.step != 1 or not len(heads) or heads.start < 0:
        raise LayoutError(f"heads is {heads!r}; give a range of step 1 with at least one head, from 0 on")
    if len(heads) > 1 and not any(component.form.headed for component in like.components):
        raise LayoutError(f"heads is {heads!r}, and like has no head axis: its content belongs to no head")
    if not set(like.heads) <= set(heads):
        raise _too_few("heads", like.heads, heads)
    return heads
