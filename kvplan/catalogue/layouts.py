"""Layouts of engines and attention backends by name, built for a model's geometry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any

from kvplan.base.values import quoted
from kvplan.catalogue.models import Group, table
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.notation import parse


@dataclass(frozen=True)
class NamedLayout:
    """A layout of an engine or attention backend, without extents.

    Attributes:
        name: its name on the command line.
        side: the memory in which engines keep it, ``"device"`` or ``"host"``.
        kind: ``"mha"`` (K and V of each head), ``"mla"`` (one row per token) or ``"state"`` (opaque).
        notation: see :mod:`kvplan.layout.notation`.
        source: source of the notation.
        split: extents, in elements, of split axes that models do not give; ``"tp"`` is the tensor-parallel ranks.
    """

    name: str
    side: str
    kind: str
    notation: str
    source: str
    split: Mapping[str, int | str] = field(default_factory=lambda: MappingProxyType({}))


# Groups beside K and V have no heads, and states no tokens either, so few orders are possible.
STATE = {
    "device": NamedLayout("state", "device", "state", "layer: block dim", "one tensor of states a layer"),
    "host": NamedLayout("state-host", "host", "state", "block layer dim", "page-first pool of states"),
}
ROWS = {
    "device": NamedLayout("rows", "device", "mla", "layer: block token dim", "one tensor of index keys a layer"),
    "host": NamedLayout("rows-host", "host", "mla", "block layer token dim", "page-first pool of index keys"),
}
BESIDE = {"state": STATE, "mla": ROWS}


# The default layout of each engine, by kind of cache.
ENGINES = {
    "vllm": {"mha": "vllm-LBHNC", "mla": "vllm-mla-cross-layer"},
    "sglang": {"mha": "sglang-device", "mla": "sglang-device-mla"},
    "flashinfer": {"mha": "flashinfer-NHD", "mla": "mla"},
    "tensorrt-llm": {"mha": "tensorrt-llm"},
    "transformers": {"mha": "transformers"},
}
HOSTS = {"mha": "page-first", "mla": "mla-page-first"}

# The side of the catalogue, by option of the command line.
OPTIONS = {"--engine": "device", "--host": "host"}


@cache
def named_layouts() -> dict[str, NamedLayout]:
    """Return every layout of ``layouts.toml`` by name, in the order of the file.

    >>> named_layouts()["page-first"].notation
    'block layer kv token head dim'
    """
    layouts: dict[str, NamedLayout] = {}
    for entry in table("layouts.toml")["layout"]:
        named = NamedLayout(**{**entry, "split": MappingProxyType(entry.get("split", {}))})
        if layouts.setdefault(named.name, named) is not named:
            raise LayoutError(f"layouts.toml names {named.name!r} twice")
    return layouts


def layout_for(
    named: NamedLayout,
    geometry: Group,
    *,
    num_blocks: int,
    block_tokens: int,
    dtype: str,
    tp: int = 1,
    rank: int = 0,
    device: str | None = None,
) -> KVLayout:
    """Build the layout of one tensor-parallel rank's share of a cache group, at virtual addresses.

    If all ranks share the layout (its heads are split by ``"tp"``), the whole layout is sliced to the rank's heads.

    Args:
        named: a layout of :func:`named_layouts`, or a layout that the caller makes from a notation.
        geometry: a cache group of a :class:`~kvplan.catalogue.models.Model`.
        num_blocks: number of blocks.
        block_tokens: rows per block (tokens, unless the group's rows are compressed); 1 for a group of states.
        dtype: dtype of the cache, such as ``"bf16"``, or a packed row format. A group's own dtype overrides it.
        tp: number of tensor-parallel ranks.
        rank: number of the rank.
        device: device of the layout; by default ``"cuda:0"`` or ``"cpu"``, by the layout's side.

    Raises:
        LayoutError: the layout is for another kind of group, or heads and ranks do not divide each other.

    >>> from kvplan.catalogue.models import Group
    >>> layers = Group("full", "mha", tuple(range(80)), dim=128, heads=8)
    >>> print(layout_for(named_layouts()["page-first"], layers, num_blocks=64, block_tokens=16, dtype="bf16", tp=4))
    block layer kv token head dim | layer=80 kv=2 block=64 token=16 head=2 dim=128 | bf16 on cpu
    """
    if named.kind != geometry.kind:
        raise LayoutError(
            f"layout {named.name!r} is for {_KINDS[named.kind]}; group {geometry.name!r} holds {_KINDS[geometry.kind]}"
        )
    heads = geometry.rank_heads(tp, rank)
    elements, stored = geometry.stored_as(dtype)
    shared = "tp" in named.split.values()
    extents = {
        "layer": len(geometry.layers),
        "block": num_blocks,
        "token": block_tokens,
        "head": geometry.heads if shared else len(heads),
        "dim": geometry.rank_share(elements, tp),
    }
    sizes: dict[str, Any] = {axis: size for axis, size in extents.items() if axis in parse(named.notation).axes}
    for factor, size in named.split.items():
        sizes[factor] = min(tp, geometry.heads) if size == "tp" else size
    layout = KVLayout.from_spec(
        {
            "notation": named.notation,
            "sizes": sizes,
            "dtype": stored,
            "device": device or {"device": "cuda:0", "host": "cpu"}[named.side],
            "part": geometry.part,
            "layers": geometry.layers,
            "head_start": 0 if shared else heads.start,
        }
    )
    return layout.slice(heads=heads) if shared and len(heads) < geometry.heads else layout


def choose(name: str, option: str, kind: str) -> NamedLayout:
    """Return the layout of an engine, of a layout's name, or of a notation.

    Args:
        name: empty for the default layout of a host.
        option: of :data:`OPTIONS`, which the errors name.
        kind: kind of the model's cache, ``"mha"`` or ``"mla"``.

    Raises:
        LayoutError: there is no such layout, or it is of another kind.

    >>> choose("vllm", "--engine", "mla").name
    'vllm-mla-cross-layer'
    """
    side = OPTIONS[option]
    known = {layout.name: layout for layout in named_layouts().values() if layout.side == side}
    fitting = [layout.name for layout in known.values() if layout.kind == kind]
    if side == "host" and not name:
        return known[HOSTS[kind]]
    if side == "device" and name in ENGINES:
        if kind not in ENGINES[name]:
            raise LayoutError(
                f"{option} {name!r} has no {kind} layout in the catalogue; there are {', '.join(fitting)}"
            )
        return known[ENGINES[name][kind]]
    if name in known:
        if known[name].kind != kind:
            raise LayoutError(f"{option} {name!r} is a layout of {known[name].kind} caches, and the model's is {kind}; "
                              f"{side} layouts of that are {', '.join(fitting)}")  # fmt: skip
        return known[name]
    if " " not in name.strip():
        names = list(dict.fromkeys([*(ENGINES if side == "device" else ()), *fitting]))
        near = get_close_matches(name, names, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(names)}"
        raise LayoutError(f"{option} {quoted(name)} is neither a layout of the catalogue nor a notation; {hint}")
    axes = parse(name).axes
    for axis in ("layer", "block", "token"):
        if axis not in axes:
            raise LayoutError(f"{option} '{name}' has no axis {axis!r}, which a model's cache needs")
    if ("kv" in axes) != (kind == "mha"):
        has, wanted = ("mla", "a kv axis") if kind == "mha" else ("mha", "no kv axis")
        raise LayoutError(f"{option} '{name}' is of kind {has}, and the model's cache is {kind}: {wanted}")
    return NamedLayout("as given", side, kind, name, "the command line")


_KINDS = {"mha": "K and V of each head", "mla": "one row per token (MLA)", "state": "opaque states"}
