"""Write an order of axes as notation, and as a spec from which a layout is built."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod
from typing import Any

from kvplan.advise.contents import Candidate, Content, parts_held
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.spec import DEVICE_BASE, HOST_BASE

Dims = tuple[tuple[str, int], ...]


def notation_of(candidate: Candidate, mine: KVLayout) -> str:
    """Return the notation of a candidate; if contents have different notations, all of them.

    Contents of one page stand behind ``|``, as :func:`kvplan.allocate` takes them; others are joined by ``" + "``.
    """
    several = [in_elements(dims, dtype_of(mine, one))[0] for one, dims in candidate.dims]
    if not candidate.shared:
        return " + ".join(dict.fromkeys(_words(named) for named in several))
    sections: list[tuple[tuple[str, ...], Dims]] = []
    for (one, _), named in zip(candidate.dims, several, strict=True):
        inner = named[candidate.shared :]
        if not one.kv and sections and sections[-1][1] == inner:  # parts of one shape stand before one colon
            sections[-1] = ((*sections[-1][0], one.part), inner)
        else:
            sections.append((parts_held(one), inner))
    texts = (f"{' '.join(parts)}: {_words(inner)}" for parts, inner in sections)
    return " | ".join((_words(several[0][: candidate.shared]), *texts))


def _words(named: Dims) -> str:
    return " ".join(name for name, _ in named)


def dtype_of(layout: KVLayout, one: Content) -> str:
    """Return the dtype of a content's parts in a layout; "" if the parts have several."""
    held = [next((c.dtype for c in layout.components if c.part == part), "") for part in parts_held(one)]
    named = {dtype or layout.dtype for dtype in held}
    return named.pop() if len(named) == 1 else ""


def spec_of(candidate: Candidate, mine: KVLayout, layers: Sequence[int]) -> dict[str, Any]:
    """Return the spec of a candidate that holds these layers."""
    blocks = max(mine.num_blocks * mine.block_tokens // candidate.block_tokens, 1)
    specs = [_one_spec(one, dims, mine, blocks, layers) for one, dims in candidate.dims]
    if candidate.shared:
        _put_on_page(specs, candidate.shared, mine.device)
    return specs[0] if len(specs) == 1 else {"layouts": specs}


def _one_spec(one: Content, dims: Dims, mine: KVLayout, blocks: int, layers: Sequence[int]) -> dict[str, Any]:
    named, dtype = in_elements(dims, dtype_of(mine, one))
    spec: dict[str, Any] = {
        "notation": _words(named),
        "dtype": dtype,
        "device": mine.device,
        "sizes": {**dict(named), "layer": len(layers), "block": blocks},
        "part": one.part,
        "layers": list(layers),
    }
    return spec | ({"head_start": one.heads.start} if one.heads is not None else {})


def _put_on_page(specs: Sequence[dict[str, Any]], shared: int, device: str) -> None:
    """Give specs the addresses and strides of the parts of one page, as :func:`kvplan.allocate` places them.

    Each part begins at a multiple of the bytes of its elements, and so does each page.

    >>> k, v = ({"notation": "block layer dim", "dtype": d, "sizes": {"block": 4, "layer": 2, "dim": n}}
    ...         for d, n in (("int8", 3), ("fp16", 5)))
    >>> _put_on_page([k, v], 2, "cpu")
    >>> v["address"] - k["address"], k["strides"], v["strides"]
    (4, [28, 14, 1], [14, 7, 1])
    """
    base = DEVICE_BASE.get(device.partition(":")[0], HOST_BASE)
    end = 0
    for spec in specs:
        start = -(-end // ITEMSIZE[spec["dtype"]]) * ITEMSIZE[spec["dtype"]]
        inner = [spec["sizes"][name] for name in spec["notation"].split()[shared:]]
        end = start + prod(inner) * ITEMSIZE[spec["dtype"]]
        spec["address"] = base + start
    widest = lcm(*(ITEMSIZE[spec["dtype"]] for spec in specs))
    page = -(-end // widest) * widest
    for spec in specs:
        extents = [spec["sizes"][name] for name in spec["notation"].split()]
        outer = [prod(extents[k + 1 : shared]) * (page // ITEMSIZE[spec["dtype"]]) for k in range(shared)]
        spec["strides"] = outer + [prod(extents[k + 1 :]) for k in range(shared, len(extents))]


def sizes_of_page(candidate: Candidate, mine: KVLayout) -> dict[str, int] | None:
    """Return the extents of split axes that :func:`kvplan.allocate` needs for a page; None if no call can say them.

    The call has one extent for each name. A name that has several extents is left out, if the other factors of its axis
    determine it in each part.
    """
    several = [dict(in_elements(dims, dtype_of(mine, one))[0]) for one, dims in candidate.dims]
    extents: dict[str, set[int]] = {}
    for named in several:
        for name, size in named.items():
            if "." in name:
                extents.setdefault(name, set()).add(size)
    left_out = {name for name, sizes in extents.items() if len(sizes) > 1}
    for named in several:
        axes = [name.partition(".")[0] for name in named if name in left_out]
        if len(axes) > len(set(axes)):
            return None
    return {name: sizes.pop() for name, sizes in extents.items() if name not in left_out}


def in_elements(dims: Dims, dtype: str) -> tuple[Dims, str]:
    """Return dims in elements and their dtype; in bytes, as uint8, if rows are no whole elements.

    If the innermost dim is one element, it is left out: the bytes of an element need no dim.

    >>> in_elements((("block", 1), ("dim.0", 128), ("token", 16), ("dim.1", 2)), "bf16")
    ((('block', 1), ('dim', 128), ('token', 16)), 'bf16')
    >>> in_elements((("block", 1), ("token", 16), ("dim", 132)), "fp32")
    ((('block', 1), ('token', 16), ('dim', 33)), 'fp32')
    """
    itemsize = ITEMSIZE.get(dtype, 0)
    name, size = dims[-1]
    if name.partition(".")[0] != "dim" or not itemsize or size % itemsize:
        return dims, "uint8"
    if size > itemsize or name == "dim":
        return (*dims[:-1], (name, size // itemsize)), dtype
    rest = dims[:-1]
    if name == "dim.1":
        rest = tuple(("dim" if axis == "dim.0" else axis, count) for axis, count in rest)
    return rest, dtype


def parts_of(spec: dict[str, Any]) -> tuple[str, ...]:
    """Return the parts that a spec holds.

    >>> parts_of({"notation": "block kv dim"}), parts_of({"notation": "block dim", "part": "index"})
    (('k', 'v'), ('index',))
    """
    part = spec.get("part", "kv")
    if "kv" not in spec["notation"].split():
        return (part,)
    return ("k", "v") if part == "kv" else (f"k_{part}", f"v_{part}")
