"""Find what one notation of a pool holds: the extents of its axes, its layers, heads and parts, and its dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from kvplan.base.integers import integer, integers
from kvplan.base.numbers import number_ranges
from kvplan.base.quoting import other_case, quoted
from kvplan.errors import LayoutError
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.notation import Notation
from kvplan.layout.spec import extents_of, shape_of
from kvplan.layout.strides import extent

# Short names of dtypes in specs, with their names in torch and numpy.
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64",
    "double": "float64", "byte": "uint8", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip


class Asked(NamedTuple):
    """The sizes of a pool, as :func:`kvplan.allocate` takes them; None stands for the size of ``like``."""

    num_blocks: int | None
    block_tokens: int | None
    layers: Iterable[int] | None
    heads: range | None
    sizes: Mapping[str, int]


class Content(NamedTuple):
    """The content that one notation of a pool holds.

    Attributes:
        notation: the notation.
        extents: extents of its axes and factors, in elements.
        layers, heads: global numbers.
        part: name of the content, as :meth:`kvplan.KVLayout.from_tensors` takes it.
        dtype, itemsize: name of the element type in torch and numpy, and bytes of an element.
    """

    notation: Notation
    extents: dict[str, int]
    layers: tuple[int, ...]
    heads: range
    part: str
    dtype: str
    itemsize: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of one tensor, in elements."""
        return shape_of(self.notation, self.extents)

    @property
    def counts(self) -> tuple[int, ...]:
        """Lengths of the nested lists of tensors, outermost first."""
        return tuple(self.extents[axis] for axis in self.notation.nesting)

    @property
    def told(self) -> dict[str, int]:
        """Sizes that :meth:`kvplan.KVLayout.from_tensors` takes."""
        return {k: v for k, v in self.extents.items() if k != "kv" and k not in self.notation.nesting}

    @property
    def words(self) -> str:
        """All of it in words, which processes that share a pool compare."""
        sized = " ".join(f"{name}={size}" for name, size in sorted(self.extents.items()))
        numbered = f"layers {number_ranges(self.layers)} | heads {number_ranges(self.heads)} | part {self.part}"
        return f"{self.notation} | {sized} | {self.dtype} | {numbered}"


def content_of(parsed: Notation, like: KVLayout, asked: Asked) -> Content:
    """Return what a notation holds of ``like``.

    Raises:
        LayoutError: the notation cannot hold ``like``, or a size is invalid.
    """
    if "subblock" in parsed.axes and not like.opaque:
        raise LayoutError(
            f"'{parsed}' has opaque sub-blocks, and like has token slots: write token instead of subblock"
        )
    part, content = _parts(parsed, like)
    dtype, itemsize = _dtype(like, content)
    held, span = _layers(asked.layers, like), heads_of(asked.heads, like)
    given = dict(asked.sizes)
    axes = {
        "layer": len(held),
        "block": like.num_blocks if asked.num_blocks is None else counted("num_blocks", asked.num_blocks),
        "token": (1 if like.opaque else like.block_tokens) if asked.block_tokens is None
        else counted("block_tokens", asked.block_tokens),
        "head": len(span),
        "dim": content // itemsize,
    }  # fmt: skip
    if like.opaque:
        axes["subblock"] = given.get("subblock", like.block_tokens)
    for axis, size in axes.items():
        if size != 1 and axis not in parsed.axes:
            hint = ": give sizes={'subblock': ...}, the number of opaque blocks in one block of the pool"
            raise LayoutError(f"'{parsed}' has no {axis!r} axis, and must hold {size} of them"
                              f"{hint if axis == 'token' and like.opaque else ''}")  # fmt: skip
    extents = extents_of(parsed, {k: v for k, v in axes.items() if k in parsed.axes} | given)
    for axis, size in axes.items():
        atoms = [str(atom) for atom in parsed.factors(axis)]
        if atoms and prod(extents[name] for name in atoms) != size:
            raise LayoutError(f"sizes make {axis} {prod(extents[name] for name in atoms)}; the pool needs {size}")
    return Content(parsed, extents, held, span, part, dtype, itemsize)


def _layers(layers: Iterable[int] | None, like: KVLayout) -> tuple[int, ...]:
    """Return the global numbers of the pool's layers, ascending."""
    if layers is None:
        return like.layers
    right = "give the global numbers of the pool's layers, each once"
    given = integers("layers", layers, least=0, right=right) if isinstance(layers, Iterable) else ()
    if not given or len(set(given)) != len(given):
        raise LayoutError(f"layers is {quoted(layers)}; {right}")
    if missing := sorted(set(like.layers) - set(given)):
        raise LayoutError(
            f"like holds layers {number_ranges(missing)}, and the pool's layers are {number_ranges(sorted(given))}; "
            "slice like first"
        )
    return tuple(sorted(given))


def counted(name: str, value: Any) -> int:
    """Return a number of blocks or tokens, which is at least 1."""
    return integer(name, value, least=1, right="a pool has at least one")


def heads_of(heads: range | None, like: KVLayout) -> range:
    """Return the global numbers of the pool's heads."""
    if heads is None:
        return like.heads
    if not isinstance(heads, range) or heads.step != 1 or not len(heads) or heads.start < 0:
        raise LayoutError(f"heads is {heads!r}; give a range of step 1 with at least one head, from 0 on")
    if len(heads) > 1 and not any(component.form.headed for component in like.components):
        raise LayoutError(f"heads is {heads!r}, and like has no head axis: its content belongs to no head")
    if like.heads.start < heads.start or like.heads.stop > heads.stop:
        raise LayoutError(
            f"like holds heads {number_ranges(like.heads)}, and the pool's heads are {number_ranges(heads)}; "
            "slice like first"
        )
    return heads


def _parts(notation: Notation, like: KVLayout) -> tuple[str, int]:
    """Return the name of the content, and its bytes per (token, head)."""
    sizes = {extent(c.form.dim) for c in like.components}
    heads = {extent(c.form.head) for c in like.components}
    if len(sizes) > 1 or len(heads) > 1:
        raise LayoutError(
            f"parts {like.parts} hold {sorted(sizes)} bytes per (token, head) and {sorted(heads)} heads, and one "
            "notation holds parts of one size; write one page, as in 'block layer | k: head dim | v: head dim', or "
            "allocate each from like.slice(parts=...) and merge"
        )
    if len({(c.layer, c.part) for c in like.components}) != len(like.layers) * len(like.parts):
        raise LayoutError(f"not every layer of {like} holds every part; allocate each part from its own slice")
    if "kv" not in notation.axes:
        if len(like.parts) != 1:
            raise LayoutError(
                f"'{notation}' has no kv axis, and must hold parts {like.parts}; write kv, as in (kv dim)"
            )
        return like.parts[0], sizes.pop()
    pair, name = like.parts, like.parts[0][1:]
    if pair == (f"k{name}", f"v{name}"):
        return name.removeprefix("_") or "kv", sizes.pop()
    hint = next((hint for hint in (other_case(part, ("k", "v")) for part in pair) if hint), "")
    raise LayoutError(f"'{notation}' has a kv axis for parts ('k', 'v'), and like holds {pair}; leave out kv{hint}")


def _dtype(like: KVLayout, content: int) -> tuple[str, int]:
    """Return name and bytes of the pool's element type: the type of ``like`` if it divides the content, else uint8."""
    held = {component.dtype or like.dtype for component in like.components}  # parts of merged layouts have their own
    dtype = held.pop() if len(held) == 1 else ""
    itemsize = ITEMSIZE.get(dtype)
    return (_DTYPES.get(dtype, dtype), itemsize) if itemsize and content % itemsize == 0 else ("uint8", 1)
