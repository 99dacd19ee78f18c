"""Allocate a pool in the best order for a layout: ``allocate("auto", like=...)``."""

from __future__ import annotations

from collections.abc import Callable

from kvplan.advise.advise import Wanted, host_orders
from kvplan.advise.orders import parts_of
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout

AUTO = "auto"


def allocated(like: KVLayout, wanted: Wanted, make: Callable[..., KVLayout]) -> KVLayout:
    """Search the best order of a pool and allocate it: in one allocation, or in one for each of the parts that differ.

    Args:
        like: the layout whose content the pool will hold.
        wanted: block size, heads and device of the pool, and whether it is one allocation, as a pool with a name is.
        make: allocates one order. It takes a notation, ``like``, ``sizes``, ``heads`` and ``block_tokens``.

    Raises:
        LayoutError: no order of axes holds the content.
    """
    advice = host_orders(like, wanted)
    if not advice.orders:
        raise LayoutError(
            f"'auto' found no order of a pool for {like}: {advice.reason}; give a notation, or allocate each part from "
            "like.slice(parts=...)"
        )
    best = advice.orders[0]

    def pool(notation: str, own: KVLayout, sizes: dict[str, int]) -> KVLayout:
        # Opaque blocks move whole; scales have no heads, and an index has one of its own.
        heads = wanted.heads if own.heads == like.heads else None
        tokens = None if own.opaque else wanted.block_tokens
        return make(notation, like=own, sizes=sizes or None, heads=heads, block_tokens=tokens)

    if best.sizes is not None:
        return pool(best.notation, like, best.sizes)
    pools = []
    for spec in best.spec.get("layouts", [best.spec]):
        parts, layers = parts_of(spec), tuple(spec["layers"])
        whole = (set(parts), layers) == (set(like.parts), like.layers)
        sizes = {name: size for name, size in spec["sizes"].items() if "." in name or name == "subblock"}
        pools.append(pool(spec["notation"], like if whole else like.slice(parts=parts, layers=layers), sizes))
    return pools[0] if len(pools) == 1 else KVLayout.merge(pools)
