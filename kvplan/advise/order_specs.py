"""Orders of axes for what a layout holds, written as notation, as sizes, and as a spec."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm, prod
from typing import Any, NamedTuple

from kvplan.layout.components import Component
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.spec import DEVICE_BASE, HOST_BASE

Dims = tuple[tuple[str, int], ...]


class Atom(NamedTuple):
    """One loop of a block: its axis, its steps, and bytes from step to step in the layout; 0 if the layout lacks it."""

    axis: str
    steps: int
    stride: int


class Kind(NamedTuple):
    """Parts of one shape, and the layers that hold them.

    Attributes:
        parts: names of the parts; K and V of one shape are two.
        layers: global numbers of the layers.
        dtype: name of the elements; ``uint8`` if rows are no whole elements.
        heads: global numbers of the pool's heads; None without an axis of heads.
        first: the first component.
        outer: the atoms of blocks, of units of a block, of shares of the heads, of layers, and of K and V.
        inner: the atoms of one unit, in order of memory.
    """

    parts: tuple[str, ...]
    layers: tuple[int, ...]
    dtype: str
    heads: range | None
    first: Component
    outer: tuple[Atom, ...]
    inner: tuple[Atom, ...]


class Pool(NamedTuple):
    """The pool that an order is looked for: its device, its token slots, and its heads, None for the layout's."""

    device: str
    slots: int
    heads: range | None = None


class Candidate(NamedTuple):
    """An order of axes.

    Attributes:
        dims: for each kind, its dims, outermost first: name and extent in elements.
        block_tokens: token slots per block.
        rank: runs and extents per token, by the strides; smaller is better.
        far: split axes, and the distance from the usual order; smaller is better if ranks are equal.
        shared: number of outermost dims that all kinds share, so that one page holds all of them; 0 if each has an
            allocation.
    """

    dims: tuple[tuple[Kind, Dims], ...]
    block_tokens: int
    rank: tuple[Fraction, Fraction]
    far: tuple[int, int]
    shared: int = 0

    @property
    def notation(self) -> str:
        """The notation; parts of one page stand behind ``|``, and allocations of their own are joined by ``" + "``."""
        if not self.shared:
            return " + ".join(dict.fromkeys(words(dims) for _, dims in self.dims))
        sections: list[tuple[list[str], str]] = []
        for kind, dims in self.dims:
            text = words(dims[self.shared :])
            if sections and sections[-1][1] == text and (kind.parts[0] in sections[-1][0] or "kv" not in text.split()):
                sections[-1][0].extend(part for part in kind.parts if part not in sections[-1][0])
            else:
                sections.append((list(kind.parts), text))
        shared = words(self.dims[0][1][: self.shared])
        return " | ".join((shared, *(f"{' '.join(parts)}: {text}" for parts, text in sections)))

    @property
    def sizes(self) -> dict[str, int] | None:
        """The extents of split axes that :func:`kvplan.allocate` needs for a page; None if no call can say them.

        The call has one extent for each name. A name with several is left out, if the other factors determine it.
        """
        extents: dict[str, set[int]] = {}
        for name, size in (dim for _, dims in self.dims for dim in dims):
            if "." in name or name == "subblock":
                extents.setdefault(name, set()).add(size)
        unclear = {name for name, sizes in extents.items() if len(sizes) > 1}
        for _, dims in self.dims:
            axes = [name.partition(".")[0] for name, _ in dims if name in unclear]
            if len(axes) > len(set(axes)) or "subblock" in axes:
                return None
        return {name: sizes.pop() for name, sizes in extents.items() if name not in unclear}

    def spec(self, pool: Pool) -> dict[str, Any]:
        """Return the spec of a pool in this order."""
        specs: list[dict[str, Any]] = []
        for kind, dims in self.dims:
            part = kind.parts[0] if len(kind.parts) == 1 else kind.parts[0].partition("_")[2] or "kv"
            spec = {"notation": words(dims), "dtype": kind.dtype, "device": pool.device, "sizes": dict(dims),
                    "part": part, "layers": list(kind.layers)}  # fmt: skip
            specs.append(spec if kind.heads is None else spec | {"head_start": kind.heads.start})
        if self.shared:
            self._place(specs, DEVICE_BASE.get(pool.device.partition(":")[0], HOST_BASE))
        return specs[0] if len(specs) == 1 else {"layouts": specs}

    def _place(self, specs: Sequence[dict[str, Any]], base: int) -> None:
        """Give specs the addresses and strides of the parts of one page, as :func:`kvplan.allocate` places them.

        Each part begins at a multiple of the bytes of its elements, and so does each page.
        """
        end, elements = 0, [ITEMSIZE[kind.dtype] for kind, _ in self.dims]
        extents = [[size for _, size in dims] for _, dims in self.dims]
        for spec, sizes, element in zip(specs, extents, elements, strict=True):
            start = -(-end // element) * element
            spec["address"], end = base + start, start + prod(sizes[self.shared :]) * element
        page = -(-end // lcm(*elements)) * lcm(*elements)
        for spec, sizes, element in zip(specs, extents, elements, strict=True):
            outer = [prod(sizes[k + 1 : self.shared]) * (page // element) for k in range(self.shared)]
            spec["strides"] = outer + [prod(sizes[k + 1 :]) for k in range(self.shared, len(sizes))]


def words(dims: Dims) -> str:
    """Return the names of dims, as a notation has them."""
    return " ".join(name for name, _ in dims)


def parts_of(spec: dict[str, Any]) -> tuple[str, ...]:
    """Return the parts that a spec holds.

    >>> parts_of({"notation": "block kv dim"}), parts_of({"notation": "block dim", "part": "index"})
    (('k', 'v'), ('index',))
    """
    part = spec.get("part", "kv")
    if "kv" not in spec["notation"].split():
        return (part,)
    return ("k", "v") if part == "kv" else (f"k_{part}", f"v_{part}")
