"""``kvplan advise``: find the best order of a host pool for a layout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any

from kvplan.advise.advise import Advice, Numbers, Order
from kvplan.advise.host_order import TOKENS, Wanted, host_orders, pricing_for
from kvplan.advise.order_specs import parts_of
from kvplan.advise.prices import Price
from kvplan.base.numbers import count_of, duration
from kvplan.cli.answer import Answer, Part, Table, table
from kvplan.cli.arguments import add_pair, add_shared, pair_of, positive, source_of
from kvplan.cli.screen import Tell
from kvplan.cost.model import Candidate
from kvplan.cost.policy import Policy
from kvplan.cost.store import profile_of
from kvplan.layout.kvlayout import KVLayout
from kvplan.program.program import Extents

EXAMPLES = """examples:
  kvplan advise examples/specs/x_packed.toml --block-tokens 64
  kvplan advise examples/specs/gpu_split_kv.toml \\
      examples/specs/host_token_major.toml --direction load"""
DIRECTIONS = {"both": ("store", "load"), "store": ("store",), "load": ("load",)}
RANKS = ("best", "second", "third")
ORDER = "notation block_tokens unit_tokens? unit_nbytes? runs? run_nbytes? extents times spec"


class PathTime(Part, sources=(Candidate,), names="path"):
    """The path that is taken.

    Attributes:
        seconds: predicted.
    """

    seconds: float

    def __str__(self) -> str:
        return f"{duration(self.seconds)} by {self.path}"


class OrderFacts(Part, sources=(Order, Numbers), names=ORDER):
    """An order of axes, and its copies.

    Attributes:
        extents: contiguous byte ranges of a unit on the side that may change.
        times: of each route; null without a cost model.
        spec: from which KVLayout.from_spec makes it; absent of the present layout.
        refused: true if the present layout cannot be compiled; its numbers are null.
    """

    extents: Extents | None
    times: dict[str, PathTime] | None
    spec: dict[str, Any] | None = None
    refused: bool = False
    rank: str = field(kw_only=True)
    shown = ": rank, order: notation, tokens: block_tokens, runs, run_nbytes, extents, times"

    @classmethod
    def read(cls, numbers: Numbers | None, price: Price | None, *sources: object, **more: Any) -> OrderFacts:
        """Return the numbers of an order, or of a layout that cannot be compiled."""
        routes = {} if price is None else price.routes
        seconds = {route: PathTime.of(one, seconds=one.wall) for route, one in routes.items()}
        lacked = dict.fromkeys(Numbers._fields) | {"refused": True} if numbers is None else {}
        return cls.of(*sources, numbers, times=seconds or None, **lacked, **more)


def orders(advice: Advice, present: KVLayout | None) -> dict[str, Any]:
    """Return the fields ``tried``, ``present`` and ``orders`` of an answer."""
    now = None if present is None else OrderFacts.read(advice.present, advice.price, present, rank="now")
    better = tuple(OrderFacts.read(one.numbers, one.price, one, spec=to_paste(one.spec), rank=rank)
                   for rank, one in zip(RANKS, advice.orders, strict=False))  # fmt: skip
    return {"tried": advice.tried, "present": now, "orders": better}


def order_blocks(answer: Any, kept: str) -> Iterator[Any]:
    """Yield the orders of an answer that has the fields of :func:`orders`; ``kept`` names the present layout."""
    some = [one for one in (answer.present, *answer.orders) if one is not None and not one.refused]
    if some:
        yield table(some)
    tried = f"{count_of(answer.tried, 'order')} that were tried"
    if not answer.tried:
        said = "not known: no order was tried, as none holds all of these layers and parts"
    elif answer.present is not None and answer.present.refused:
        said = f"{'as above, of' if answer.orders else 'none of'} {tried}; the present order cannot be compiled at all"
    else:
        said = f"as above, of {tried}" if answer.orders else f"nothing: {kept} is as good as any of {tried}"
    yield Table([("best", said)])


class Subject(Part, sources=(KVLayout,), names="notation device block_tokens"):
    """The layout that does not change."""


class AdviseAnswer(Answer, names="layout routes tokens profile tried present orders"):
    """The best orders of a host pool for a layout.

    Attributes:
        layout: the layout that does not change.
        routes: transfers whose time counts; null if there is no cost model for them.
        tokens: of one transfer.
        profile: the GPU whose costs predict times.
        tried: number of orders.
        present: the pool's present layout; null without HOST.
        orders: the best first.
    """

    schema = "advise/1"
    layout: Subject
    routes: tuple[str, ...] | None
    tokens: int | None
    profile: str | None
    tried: int
    present: OrderFacts | None
    orders: tuple[OrderFacts, ...]
    by: str = field(kw_only=True)
    paste: str = field(kw_only=True)

    def blocks(self) -> Iterable[Any]:
        """Return the orders, and lines that make a pool of the best."""
        about = [("for", f"{self.layout.notation}, on {self.layout.device}"), ("by", self.by)]
        return [Table(about), *order_blocks(self, "HOST"), *([self.paste] if self.paste else [])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser, ("layout", "host"), "?", "cuda:0")
    tokens = "token slots per block of the pool (default: as HOST, else as LAYOUT)"
    parser.add_argument("--block-tokens", type=positive, metavar="N", help=tokens)
    counts = "the transfers whose time counts (default both)"
    parser.add_argument("--direction", choices=DIRECTIONS, default="both", help=counts)
    moved = f"tokens of one transfer (default {TOKENS:,})"
    parser.add_argument("--tokens", type=positive, default=TOKENS, metavar="N", help=moved)
    add_shared(parser, "--profile", "--overlap")


def run(args: argparse.Namespace, tell: Tell) -> AdviseAnswer:
    """Return the best orders."""
    policy = Policy(overlap=args.overlap or "idle")
    profile, where = profile_of(args.profile)
    layout, host = (source_of(args), None) if args.destination is None else pair_of(args)
    device = "cpu" if host is None else host.device
    pricing = pricing_for(
        layout, device, profile, directions=DIRECTIONS[args.direction], tokens=args.tokens, policy=policy
    )
    advice = host_orders(layout, pricing, present=host, wanted=Wanted(block_tokens=args.block_tokens), tell=tell)
    if pricing is None:
        by = "runs and extents: there is no cost model for these transfers"
        if layout.device == device == "cpu":
            by += '\nboth sides are on the CPU; a cache of a GPU has device "cuda:0" in its spec'
    else:
        moved = count_of(pricing.tokens, "token")
        by = f"the time of {' and '.join(pricing.routes)} of {moved}, blocks in no order\n"
        by += where or f"as on {profile.kind}"
    return AdviseAnswer.of(
        pricing,
        layout=Subject.of(layout),
        **dict.fromkeys(("routes", "tokens", "profile")) if pricing is None else {"profile": profile.kind},
        **orders(advice, host),
        by=by,
        paste="\n".join(_paste(advice.orders[0], layout)) if advice.orders else "",
    )


def to_paste(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec without the keys that have their default values.

    >>> to_paste({"notation": "block layer dim", "part": "kv", "layers": [0, 1], "sizes": {"layer": 2}})
    {'notation': 'block layer dim', 'sizes': {'layer': 2}}
    """
    if "layouts" in spec:
        return {"layouts": [to_paste(one) for one in spec["layouts"]]}
    usual = {"part": "kv", "head_start": 0, "layers": list(range(spec["sizes"]["layer"]))}
    return {name: value for name, value in spec.items() if name not in usual or usual[name] != value}


def _paste(order: Order, layout: KVLayout) -> Iterator[str]:
    """Return the lines of Python, and those of a spec, that make a pool of an order."""
    yield "# in Python, where `gpu` is the layout"
    specs = order.spec.get("layouts", [order.spec])
    if order.sizes is not None:
        calls = [_call(order, layout, order.notation, [part for spec in specs for part in parts_of(spec)], order.sizes)]
    else:
        calls = [_call(order, layout, spec["notation"], parts_of(spec), spec["sizes"]) for spec in specs]
    merged = ["pool = kvplan.KVLayout.merge([", *(f"    {call}," for call in calls), "])"]
    yield from [f"pool = {calls[0]}"] if len(calls) == 1 else merged
    yield "\n# as a spec (TOML)"
    spec = to_paste(order.spec)
    for one in spec.get("layouts", [spec]):
        yield from ["[[layouts]]"] * ("layouts" in spec)
        yield from (f"{name} = {json.dumps(value)}" for name, value in one.items() if name != "sizes")
        sizes = (f"{json.dumps(name) if '.' in name else name} = {size}" for name, size in one["sizes"].items())
        yield f"sizes = {{ {', '.join(sizes)} }}"


def _call(order: Order, layout: KVLayout, notation: str, parts: Iterable[str], sizes: dict[str, int]) -> str:
    """Return the call of :func:`kvplan.allocate` for some parts."""
    parts, split = tuple(parts), {name: size for name, size in sizes.items() if "." in name}
    like = "gpu" if set(parts) == set(layout.parts) else f"gpu.slice(parts={json.dumps(parts)})"
    tokens = f", block_tokens={order.block_tokens}" * (order.block_tokens != layout.block_tokens)
    return f'kvplan.allocate("{notation}", like={like}{tokens}{f", sizes={json.dumps(split)}" if split else ""})'
