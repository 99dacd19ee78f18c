"""``kvplan advise``: find the best order of a host pool for a layout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any

from kvplan.advise.advise import Advice, Numbers, Order, Wanted, advise, host_orders
from kvplan.advise.orders import parts_of
from kvplan.base.numbers import count_of
from kvplan.cli.answer import Answer, Part, Table, table
from kvplan.cli.arguments import add_pair, pair_of, positive, source_of
from kvplan.cli.screen import Tell
from kvplan.errors import IncompatibleLayoutsError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.copy_program import compile_quietly
from kvplan.program.program import Extents

EXAMPLES = """examples:
  kvplan advise examples/specs/x_packed.toml --block-tokens 64
  kvplan advise examples/specs/gpu_split_kv.toml \\
      examples/specs/host_token_major.toml"""
RANKS = ("best", "second", "third")


class OrderFacts(
    Part,
    sources=(Order, Numbers),
    names="notation block_tokens unit_tokens unit_nbytes runs run_nbytes extents spec",
):
    """An order of axes, and its copies.

    Attributes:
        extents: contiguous byte ranges of a unit on the side that may change.
        spec: from which KVLayout.from_spec makes it; absent of the present layout.
    """

    extents: Extents
    spec: dict[str, Any] | None = None
    rank: str = field(kw_only=True)
    shown = ": rank, order: notation, tokens: block_tokens, runs, run_nbytes, extents"


class AdviceFacts(Part, sources=(Advice,), names="change tried reason present orders"):
    """Better orders of one side.

    Attributes:
        change: the side that may change, src or dst.
        tried: number of orders.
        reason: why no order was tried; else empty.
        present: its present order; null if there is none, or it cannot be compiled.
        orders: the best first.
    """

    present: OrderFacts | None
    orders: tuple[OrderFacts, ...]

    @classmethod
    def read(cls, advice: Advice, present: KVLayout | None) -> AdviceFacts:
        """Return the facts of an advice; ``present`` is the side that may change, as it is."""
        now = present and advice.present and OrderFacts.of(present, advice.present, spec=None, rank="now")
        orders = (OrderFacts.of(one, one.numbers, rank=rank) for rank, one in zip(RANKS, advice.orders, strict=False))
        return cls.of(advice, present=now or None, orders=tuple(orders))

    def blocks(self, kept: str) -> Iterator[Any]:
        """Yield the orders, and what they come to; ``kept`` names the present layout."""
        some = [one for one in (self.present, *self.orders) if one is not None]
        if some:
            yield table(some)
        verdict = f"as above, of {count_of(self.tried, 'order')} that were tried"
        if not self.tried:
            verdict = f"not known, as no order was tried: {self.reason}"
        elif not self.orders:
            verdict = f"{kept}, as it is: none of {count_of(self.tried, 'order')} has fewer runs or extents"
        yield Table([("best", verdict)])


class AdviseAnswer(Answer):
    """The best orders of a host pool for a layout.

    Attributes:
        notation: of the layout that does not change.
        device: where it lies.
        block_tokens: its tokens a block.
        advice: the orders; their present is null without HOST.
    """

    schema = "advise/2"
    notation: str
    device: str
    block_tokens: int
    advice: AdviceFacts
    paste: str = field(kw_only=True)
    refused: str = field(kw_only=True)

    def blocks(self) -> Iterable[Any]:
        """Return the orders, and lines that make a pool of the best."""
        about = [("for", f"{self.notation}, on {self.device}")]
        if self.refused:
            about.append(("HOST", f"cannot be compiled as it is: {self.refused}"))
        return [Table(about), *self.advice.blocks("HOST"), *([self.paste] if self.paste else [])]


def add_advise(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser, ("layout", "host"), "?", "cuda:0")
    tokens = "token slots per block of the pool (default: as HOST, else as LAYOUT)"
    parser.add_argument("--block-tokens", type=positive, metavar="N", help=tokens)


def run_advise(args: argparse.Namespace, tell: Tell) -> AdviseAnswer:
    """Return the best orders."""
    layout, host = (source_of(args), None) if args.destination is None else pair_of(args)
    refused = ""
    if host is None:
        advice = host_orders(layout, Wanted(args.block_tokens), tell)
    else:
        advice = advise(layout, host, "dst", (args.block_tokens or host.block_tokens,), tell)
        try:
            compile_quietly(layout, host)
        except IncompatibleLayoutsError as error:
            refused = " ".join(str(error).split())
    paste = "\n".join(_paste(advice.orders[0], layout)) if advice.orders else ""
    return AdviseAnswer.of(layout, advice=AdviceFacts.read(advice, host), paste=paste, refused=refused)


def _paste(order: Order, layout: KVLayout) -> Iterator[str]:
    """Return the lines of Python that make a pool of an order."""
    yield "# in Python, where `gpu` is the layout; --json has a spec"
    specs = order.spec.get("layouts", [order.spec])
    if order.sizes is not None:
        calls = [_call(order, layout, order.notation, {part for spec in specs for part in parts_of(spec)}, order.sizes)]
    else:
        calls = [
            _call(order, layout, spec["notation"], parts_of(spec), spec["sizes"], spec["layers"]) for spec in specs
        ]
    if len(calls) == 1:
        yield f"pool = {calls[0]}"
    else:
        yield from ("pool = kvplan.KVLayout.merge([", *(f"    {call}," for call in calls), "])")


def _call(
    order: Order, layout: KVLayout, notation: str, parts: Iterable[str], sizes: dict[str, int],
    layers: Iterable[int] = (),
) -> str:  # fmt: skip
    """Return the call of :func:`kvplan.allocate` for some parts and layers."""
    parts, layers = tuple(parts), tuple(layers) or layout.layers
    split = {name: size for name, size in sizes.items() if "." in name or name == "subblock"}
    chosen = [f"parts={json.dumps(parts)}"] * (set(parts) != set(layout.parts))
    chosen += [f"layers={layers}"] * (set(layers) != set(layout.layers))
    like = f"gpu.slice({', '.join(chosen)})" if chosen else "gpu"
    tokens = f", block_tokens={order.block_tokens}" * (order.block_tokens != layout.block_tokens)
    return f'kvplan.allocate("{notation}", like={like}{tokens}{f", sizes={json.dumps(split)}" if split else ""})'
