"""Facts and rows of the best orders of a pool, and the lines that make such a pool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvplan.advise.advise import Advice, Numbers, Order
from kvplan.advise.order_specs import parts_of
from kvplan.advise.prices import Price, Pricing
from kvplan.base.numbers import binary, count_of, duration, exact
from kvplan.cli.answers.layout_facts import UNIT, picked
from kvplan.layout.kvlayout import KVLayout

RANKS = ("best", "second", "third")


class Question(NamedTuple):
    """A layout, the pool that it is asked for, and the answer.

    Attributes:
        layout: the layout that does not change.
        host: the pool's present layout, or None.
        pricing: the transfers whose time counts; None if there is no cost model for them.
        found: the orders.
        where: a remark on the profile, or "".
    """

    layout: KVLayout
    host: KVLayout | None
    pricing: Pricing | None
    found: Advice
    where: str


def numbers_facts(numbers: Numbers, price: Price | None) -> dict[str, Any]:
    """Return the numbers of a program and its predicted times; times are seconds, and other numbers bytes."""
    extents = dict(zip(("count", "min_nbytes", "max_nbytes"), numbers.extents, strict=True))
    times = None if price is None else {
        route: {"path": one.path, "seconds": one.wall} for route, one in price.routes.items()
    }  # fmt: skip
    return {**picked(numbers, UNIT), "extents": extents, "times": times}


def advice_facts(asked: Question) -> dict[str, Any]:
    """Return the answer as plain facts."""
    layout, found, pricing = asked.layout, asked.found, asked.pricing
    return {
        "layout": {"notation": layout.notation, "device": layout.device, "block_tokens": layout.block_tokens},
        "routes": None if pricing is None else list(pricing.routes),
        "tokens": None if pricing is None else pricing.tokens,
        "profile": None if pricing is None else pricing.profile.kind,
        "tried": found.tried,
        "present": None if asked.host is None else {
            "notation": asked.host.notation,
            "block_tokens": asked.host.block_tokens,
            **({"refused": True} if found.present is None else numbers_facts(found.present, found.price)),
        },
        "orders": [
            {"notation": order.notation, "block_tokens": order.block_tokens,
             **numbers_facts(order.numbers, order.price), "spec": spec_to_paste(order.spec)}
            for order in found.orders
        ],
    }  # fmt: skip


def advice_rows_of(asked: Question) -> Iterator[tuple[str, str]]:
    """Return the answer as rows of words."""
    layout, found, pricing = asked.layout, asked.found, asked.pricing
    yield "for", f"{layout.notation}, on {layout.device}"
    if pricing is None:
        yield "by", "runs and extents: there is no cost model for these transfers"
        if layout.device == "cpu" and (asked.host is None or asked.host.device == "cpu"):
            yield "", 'both sides are on the CPU; a cache of a GPU has device "cuda:0" in its spec'
    else:
        each = " and ".join(pricing.routes)
        yield "by", f"the time of {each} of {count_of(pricing.tokens, 'token')}, blocks in no order"
        yield "", asked.where or f"as on {pricing.profile.kind}"
    if asked.host is not None:
        yield "now", f"{asked.host.notation}, blocks of {count_of(asked.host.block_tokens, 'token')}"
        if found.present is None:
            yield "", "cannot be compiled with the layout: kvplan diff says why"
        else:
            yield from (("", line) for line in _lines(found.present, found.price))
    if not found.orders:
        yield "best", f"nothing: HOST is as good as any of {count_of(found.tried, 'order')} that were tried"
    for rank, order in zip(RANKS, found.orders, strict=False):
        names = iter((rank,))
        for line in _orders_of(order):
            yield next(names, ""), line
        yield from (("", line) for line in _lines(order.numbers, order.price))
    if found.orders:
        yield "of", f"{count_of(found.tried, 'order')} that were tried"


def _orders_of(order: Order) -> Iterator[str]:
    """Return an order's notation; parts that differ and have an allocation each have a line each."""
    specs = order.spec.get("layouts", [order.spec])
    blocks = f"blocks of {count_of(order.block_tokens, 'token')}"
    if order.sizes is not None:
        yield f"{order.notation}, {blocks}, one page for all parts"
        return
    if len(specs) == 1:
        yield f"{specs[0]['notation']}, {blocks}"
        return
    yield f"{blocks}, an allocation for each of these parts:"
    yield from (f"{' '.join(parts_of(spec))}: {spec['notation']}" for spec in specs)


def _lines(numbers: Numbers, price: Price | None) -> Iterator[str]:
    if price is not None:
        yield ", ".join(f"{route} {duration(one.wall)} by {one.path}" for route, one in price.routes.items())
    low, high = numbers.run_nbytes
    size = binary(high) if low == high else f"{low:,} to {exact(high)}"
    extents = count_of(numbers.extents[0], "extent")
    yield f"{count_of(numbers.runs, 'run')} of {size}, and {extents}, a unit of {binary(numbers.unit_nbytes)}"


def spec_to_paste(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec without the keys that have their default values.

    >>> spec_to_paste({"notation": "block layer dim", "part": "kv", "layers": [0, 1], "sizes": {"layer": 2}})
    {'notation': 'block layer dim', 'sizes': {'layer': 2}}
    """
    if "layouts" in spec:
        return {"layouts": [spec_to_paste(one) for one in spec["layouts"]]}
    usual = {"part": "kv", "head_start": 0, "layers": list(range(spec["sizes"]["layer"]))}
    return {name: value for name, value in spec.items() if name not in usual or usual[name] != value}


def paste_lines(asked: Question) -> Iterator[str]:
    """Return the lines of Python, and those of a spec, that make a pool of the best order."""
    if not asked.found.orders:
        return
    best = asked.found.orders[0]
    yield ""
    yield "# in Python, where `gpu` is the layout"
    yield from python_lines(best, asked.layout)
    yield ""
    yield "# as a spec (TOML)"
    yield from toml_lines(spec_to_paste(best.spec))


def python_lines(order: Order, layout: KVLayout) -> Iterator[str]:
    """Return the calls of :func:`kvplan.allocate` that make a pool of an order; a part of its own has its own call."""
    calls = [_call(order, layout, *told) for told in _allocations(order)]
    if len(calls) == 1:
        yield f"pool = {calls[0]}"
        return
    yield "pool = kvplan.KVLayout.merge(["
    yield from (f"    {call}," for call in calls)
    yield "])"


def _allocations(order: Order) -> Iterator[tuple[str, tuple[str, ...], dict[str, int]]]:
    """Return the notation, parts and split axes of each allocation of an order."""
    specs = order.spec.get("layouts", [order.spec])
    if order.sizes is not None:
        yield order.notation, tuple(part for spec in specs for part in parts_of(spec)), order.sizes
        return
    for spec in specs:
        split = {name: size for name, size in spec["sizes"].items() if "." in name}
        yield spec["notation"], parts_of(spec), split


def _call(order: Order, layout: KVLayout, notation: str, parts: tuple[str, ...], split: dict[str, int]) -> str:
    like = "gpu" if set(parts) == set(layout.parts) else f"gpu.slice(parts={json.dumps(parts)})"
    tokens = f", block_tokens={order.block_tokens}" * (order.block_tokens != layout.block_tokens)
    sizes = f", sizes={json.dumps(split)}" if split else ""
    return f'kvplan.allocate("{notation}", like={like}{tokens}{sizes})'


def toml_lines(spec: dict[str, Any]) -> Iterator[str]:
    r"""Return a spec as lines of TOML.

    >>> print("\n".join(toml_lines({"notation": "block layer dim", "sizes": {"layer": 2, "dim.0": 4}})))
    notation = "block layer dim"
    sizes = { layer = 2, "dim.0" = 4 }
    """
    if "layouts" in spec:
        for one in spec["layouts"]:
            yield "[[layouts]]"
            yield from toml_lines(one)
        return
    for name, value in spec.items():
        if name != "sizes":
            yield f"{name} = {json.dumps(value)}"
    sizes = (f"{json.dumps(name) if '.' in name else name} = {size}" for name, size in spec["sizes"].items())
    yield f"sizes = {{ {', '.join(sizes)} }}"
