"""Predicted times of a model's requests by the best path, and the better order of the host side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvplan.advise.advise import Advice
from kvplan.advise.host_order import host_orders
from kvplan.advise.prices import Price, Pricing
from kvplan.cost.policy import Policy
from kvplan.cost.profile import DeviceProfile
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.copy_program import CopyProgram, compile_quietly

ROUTES = ("load", "store")


class Costs(NamedTuple):
    """The costs that times are predicted from.

    Attributes:
        profile: profile of the device.
        policy: the compute that runs at the same time.
        where: a remark on the profile, or "".
        advice: whether to search a better order of the host side.
    """

    profile: DeviceProfile
    policy: Policy
    where: str
    advice: bool

    def pricing(self, tokens: int) -> Pricing:
        """Return the pricing of a load and a store of some tokens."""
        return Pricing(self.profile, ROUTES, tokens, self.policy)


class Sides(NamedTuple):
    """The device and host layout of one rank and cache group, and its programs."""

    device: KVLayout
    host: KVLayout
    programs: dict[str, CopyProgram]

    @classmethod
    def of(cls, device: KVLayout, host: KVLayout) -> Sides:
        """Compile both ways."""
        return cls(device, host, {"store": compile_quietly(device, host), "load": compile_quietly(host, device)})


def times_of(groups: Sequence[Sides], rows: Sequence[int], costs: Costs) -> dict[str, dict[str, Any]]:
    """Return seconds and paths of a load and a store of a request, whose groups move one after another.

    Args:
        groups: both sides of each cache group.
        rows: rows that the request holds of each group.
        costs: costs of the device.
    """
    prices = [_price(sides, held, costs) for sides, held in zip(groups, rows, strict=True)]
    return {
        route: {
            "seconds": sum(price.routes[route].wall for price in prices),
            "paths": list(dict.fromkeys(price.routes[route].path for price in prices)),
        }
        for route in ROUTES
    }


def _price(sides: Sides, rows: int, costs: Costs) -> Price:
    return costs.pricing(rows).of({route: made.program for route, made in sides.programs.items()})


def better_of(sides: Sides, rows: int, costs: Costs) -> dict[str, Any] | None:
    """Return the better order of a group's host side; None if it was not searched.

    Args:
        sides: both sides of the group.
        rows: rows of the request whose load and store count.
        costs: costs of the device.
    """
    if not costs.advice:
        return None
    try:
        found = host_orders(sides.device, costs.pricing(rows), present=sides.host)
    except LayoutError:  # parts differ between layers
        found = Advice("dst", 0, None, ())
    best = found.orders[0] if found.orders else None
    return {
        "tried": found.tried,
        "now": None if found.price is None else _seconds(found.price),
        "notation": None if best is None else best.notation,
        "block_tokens": None if best is None else best.block_tokens,
        "seconds": None if best is None or best.price is None else _seconds(best.price),
    }


def _seconds(price: Price) -> dict[str, float]:
    return {route: one.wall for route, one in price.routes.items()}
