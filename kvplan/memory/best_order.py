"""Allocate a pool in the best order for a layout: ``allocate("auto", like=...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvplan.advise.host_order import Wanted, host_orders, pricing_for
from kvplan.advise.order_specs import parts_of
from kvplan.cost.store import profile_of
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout

AUTO = "auto"


def allocated(like: KVLayout, wanted: Wanted, make: Callable[..., KVLayout]) -> KVLayout:
    """Search the best order of a pool and allocate it: in one allocation, or in one for each of the parts that differ.

    Args:
        like: the layout whose content the pool will hold.
        wanted: block size, heads and device of the pool, and whether it is one allocation, as a pool with a name is.
        make: allocates one order. It takes a notation, ``like`` and ``sizes``.

    Raises:
        LayoutError: no order of axes holds the content.
    """
    pricing = pricing_for(like, wanted.device, profile_of(None)[0])
    orders = host_orders(like, pricing, wanted=wanted).orders
    if not orders:
        raise LayoutError(_none(like, wanted))
    best = orders[0]
    if best.sizes is not None:
        return make(best.notation, like=like, sizes=best.sizes or None)
    specs = best.spec.get("layouts", [best.spec])
    pools = [make(spec["notation"], like=_held(like, parts_of(spec)), sizes=_split(spec)) for spec in specs]
    return pools[0] if len(pools) == 1 else KVLayout.merge(pools)


def _none(like: KVLayout, wanted: Wanted) -> str:
    if wanted.single:
        return (
            f"a shared pool with a name is one allocation, and no order found holds all parts of {like} in one; give a "
            "notation instead of 'auto', or allocate each part from like.slice(parts=...) under its own name"
        )
    return f"no order of a pool holds the content of {like}; give a notation instead of 'auto'"


def _held(like: KVLayout, parts: tuple[str, ...]) -> KVLayout:
    return like if set(parts) == set(like.parts) else like.slice(parts=parts)


def _split(spec: dict[str, Any]) -> dict[str, int] | None:
    """Return the extents of split axes, and of sub-blocks."""
    return {name: size for name, size in spec["sizes"].items() if "." in name or name == "subblock"} or None
