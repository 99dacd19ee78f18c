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


def allocated(like: KVLayout, wanted: Wanted, make: Callable[..., KVLayout], *, named: bool) -> KVLayout:
    """Search the best order of a pool and allocate it; parts that differ in shape get an allocation each.

    Args:
        like: the layout whose content the pool will hold.
        wanted: block size, layers, heads and device of the pool.
        make: allocates one order. It takes a notation, ``like`` and ``sizes``.
        named: whether the pool has a name, which only one allocation can have.

    Raises:
        LayoutError: no order of axes holds the content, or a pool with a name would need several allocations.
    """
    pricing = pricing_for(like, wanted.device, profile_of(None)[0])
    orders = host_orders(like, pricing, wanted=wanted).orders
    if not orders:
        raise LayoutError(f"no order of a pool holds the content of {like}; give a notation instead of 'auto'")
    specs = orders[0].spec.get("layouts", [orders[0].spec])
    if named and len(specs) > 1:
        orders_of_parts = ", ".join(f"{'/'.join(parts_of(spec))}: {spec['notation']!r}" for spec in specs)
        raise LayoutError(
            f"the best order has an allocation for each part, and a shared pool has one name; allocate each part from "
            f"like.slice(parts=...) under its own name ({orders_of_parts})"
        )
    pools = [make(spec["notation"], like=_held(like, parts_of(spec)), sizes=_split(spec)) for spec in specs]
    return pools[0] if len(pools) == 1 else KVLayout.merge(pools)


def _held(like: KVLayout, parts: tuple[str, ...]) -> KVLayout:
    return like if set(parts) == set(like.parts) else like.slice(parts=parts)


def _split(spec: dict[str, Any]) -> dict[str, int] | None:
    """Return the extents of split axes, and of sub-blocks."""
    return {name: size for name, size in spec["sizes"].items() if "." in name or name == "subblock"} or None
