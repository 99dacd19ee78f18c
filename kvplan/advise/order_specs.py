"""Write an order of axes as notation, and as a spec from which a layout is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplan.advise.contents import Candidate, Content
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.kvlayout import KVLayout

Dims = tuple[tuple[str, int], ...]


def notation_of(candidate: Candidate, dtype: str) -> str:
    """Return the notation of a candidate; if contents have different notations, all notations."""
    return " + ".join(dict.fromkeys(" ".join(name for name, _ in in_elements(dims, dtype)[0])
                                    for _, dims in candidate.dims))  # fmt: skip


def spec_of(candidate: Candidate, mine: KVLayout, layers: Sequence[int]) -> dict[str, Any]:
    """Return the spec of a candidate that holds these layers."""
    blocks = max(mine.num_blocks * mine.block_tokens // candidate.block_tokens, 1)
    specs = [_one_spec(one, dims, mine, blocks, layers) for one, dims in candidate.dims]
    return specs[0] if len(specs) == 1 else {"layouts": specs}


def _one_spec(one: Content, dims: Dims, mine: KVLayout, blocks: int, layers: Sequence[int]) -> dict[str, Any]:
    named, dtype = in_elements(dims, mine.dtype)
    spec: dict[str, Any] = {
        "notation": " ".join(name for name, _ in named),
        "dtype": dtype,
        "device": mine.device,
        "sizes": {**dict(named), "layer": len(layers), "block": blocks},
        "part": one.part,
        "layers": list(layers),
    }
    return spec | ({"head_start": one.heads.start} if one.heads is not None else {})


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
