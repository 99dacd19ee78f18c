"""Find an order of the host side that is much faster than the present one, for a program that is in use."""

from __future__ import annotations

from typing import NamedTuple

from kvplan.advise.host_order import host_orders, pricing_for
from kvplan.cost.model import Candidate
from kvplan.cost.policy import HOST_ROUTES, Policy
from kvplan.cost.profile import DeviceProfile
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout

TIMES = 2.0  # an order that is faster by this factor is worth a word


class Faster(NamedTuple):
    """An order of the host side, and the predicted transfers of :data:`~kvplan.advise.host_order.TOKENS` tokens.

    Attributes:
        notation, block_tokens: the order, and token slots per block.
        now, then: the transfer in the present order, and in this one.
    """

    notation: str
    block_tokens: int
    now: Candidate
    then: Candidate


def faster_order(src: KVLayout, dst: KVLayout, route: str, profile: DeviceProfile, policy: Policy) -> Faster | None:
    """Return the best order of the host side if it is at least :data:`TIMES` times as fast; otherwise None.

    The order takes the least time for loads and stores together, as ``kvplan advise`` counts.

    Args:
        src, dst: the layouts of the program; one lies in host memory.
        route: ``"load"`` or ``"store"``.
        profile: profile of the device.
        policy: the compute that runs at the same time, and the limits of the paths.

    >>> from kvplan.cost.store import by_name
    >>> sizes = {"layer": 32, "block": 64, "token": 16, "head": 8, "dim": 128}
    >>> gpu = KVLayout.from_spec({"notation": "layer: kv block head dim.0 token dim.1", "device": "cuda:0",
    ...                           "sizes": sizes | {"dim.1": 8}})
    >>> host = KVLayout.from_spec({"notation": "block layer kv token head dim", "sizes": sizes})
    >>> faster_order(host, gpu, "load", by_name("h100"), Policy()).notation
    'block layer kv head dim.0 token dim.1'
    """
    device, host = (dst, src) if route == "load" else (src, dst)
    pricing = pricing_for(device, host.device, profile, directions=HOST_ROUTES, policy=policy)
    if pricing is None:
        return None
    try:
        found = host_orders(device, pricing, present=host)
    except LayoutError:  # parts differ between layers, so no order of axes holds all of them
        return None
    best = found.orders[0] if found.orders else None
    if best is None or best.price is None or found.price is None:
        return None
    now, then = found.price.routes[route], best.price.routes[route]
    return Faster(best.notation, best.block_tokens, now, then) if now.wall >= TIMES * then.wall else None
