"""Find the best order of axes for one side: build each order, compile it, and compare runs and predicted times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import groupby, islice
from typing import Any, NamedTuple

from kvplan.advise.compare import evenly_layered
from kvplan.advise.contents import Candidate
from kvplan.advise.order_specs import notation_of, sizes_of_page, spec_of
from kvplan.advise.orders import candidates
from kvplan.advise.prices import Price, Pricing
from kvplan.base.limits import LIMITS
from kvplan.errors import IncompatibleLayoutsError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import direction_of
from kvplan.program.passes import compile_geometry, passes
from kvplan.program.program import Program

FEW = (2, 3)  # layers to compile if layers are equal: each further layer adds the difference of these two
SHOWN = 3
WORTH = 4  # an order is not shown if it takes this many times the runs of the best one
NEAR = 0.01  # times that differ by less than this share count as equal
Tell = Callable[[float | None, str], None]  # of the share done and a text


class Numbers(NamedTuple):
    """The numbers of a program by which orders are compared.

    Attributes:
        unit_tokens, unit_nbytes: tokens and bytes per unit.
        runs, run_nbytes: number of runs per unit; bytes of the smallest and of the largest run.
        extents: extents per unit on the side that may change: their number, smallest bytes and largest bytes.
    """

    unit_tokens: int
    unit_nbytes: int
    runs: int
    run_nbytes: tuple[int, int]
    extents: tuple[int, int, int]

    @property
    def rank(self) -> tuple[Fraction, Fraction]:
        """Return runs and extents per token, because orders may have different units; smaller is better."""
        return Fraction(self.runs, self.unit_tokens), Fraction(self.extents[0], self.unit_tokens)


class Order(NamedTuple):
    """One order of axes for the side that may change, with the numbers of its program.

    Attributes:
        notation: the order's notation; if parts differ, each part's notation, joined by ``" + "``; of one page for all
            parts, the notation with ``|`` that :func:`kvplan.allocate` takes.
        block_tokens: token slots per block.
        spec: the spec from which :meth:`kvplan.KVLayout.from_spec` builds it.
        numbers: numbers of its program.
        price: its predicted time; None without a pricing.
        sizes: extents of split axes of a page; None if it is no page of several parts.
    """

    notation: str
    block_tokens: int
    spec: dict[str, Any]
    numbers: Numbers
    price: Price | None = None
    sizes: dict[str, int] | None = None

    @property
    def split(self) -> bool:
        """Return whether the notation splits an axis."""
        return "." in self.notation


class Advice(NamedTuple):
    """The orders that are better than the present order.

    Attributes:
        change: the side that may change: ``"src"`` or ``"dst"``.
        tried: number of orders that were compiled.
        present: numbers of the present pair; None if the pair cannot be compiled.
        orders: at most three better orders with different numbers, the best first.
        price: the predicted time of the present pair; None without a pricing, or if the pair cannot be compiled.
    """

    change: str
    tried: int
    present: Numbers | None
    orders: tuple[Order, ...]
    price: Price | None = None


class _Tried(NamedTuple):
    """A candidate, its runs per token with all layers, and the programs from which they were counted."""

    runs: Fraction
    programs: tuple[Program, ...]
    candidate: Candidate


def advise(
    src: KVLayout,
    dst: KVLayout,
    change: str,
    *,
    pricing: Pricing | None = None,
    sizes: tuple[int, ...] = (),
    compare: bool = True,
    single: bool = False,
    tell: Tell | None = None,
) -> Advice:
    """Compile the pair with many orders of one side, and return the best orders.

    The candidates are the permutations of layer, K/V, block, token and head in one allocation, each with several block
    sizes; the other side's own order, with tokens split into units, and heads into the shares of ranks; and, for parts
    that differ, one page for all of them, each part in the other side's order. The best order has the least predicted
    time; if times are equal or not known, the fewest runs per token; then the fewest extents per token on the side that
    changes; then the least distance from the present order. No order that takes longer than the present one is
    returned.

    Args:
        src, dst: the layouts.
        change: the side that may change, ``"src"`` or ``"dst"``.
        pricing: the transfers whose time counts; by default only runs and extents count.
        sizes: token slots per block to try; by default several.
        compare: whether the present order counts; if not, the best orders are returned, whatever the present one is.
        single: whether all content must be in one allocation.
        tell: called with the share of the work that is done, and a text.

    >>> sizes = {"layer": 80, "block": 64, "token": 16, "head": 2, "dim": 128}
    >>> gpu, host = (KVLayout.from_spec({"notation": n, "sizes": sizes})
    ...              for n in ("layer: kv block token head dim", "kv (block token) layer head dim"))
    >>> best = advise(gpu, host, "dst").orders[0]
    >>> best.notation, best.numbers.runs, best.numbers.run_nbytes, best.numbers.extents[0]
    ('block kv layer token head dim', 160, (8192, 8192), 1)
    """
    mine, other = (src, dst) if change == "src" else (dst, src)
    present, price = None, None
    if compare:
        try:
            present, price = _judged(mine, other, change, pricing)
        except IncompatibleLayoutsError:
            present = None
    orders_to_try = candidates(mine, other, refused=compare and present is None, sizes=sizes)
    tried = _tried((one for one in orders_to_try if not single or one.allocations == 1), mine, other, change, tell)
    orders: list[Order] = []
    for runs, alike in groupby(tried, key=lambda one: one.runs):
        far = runs > WORTH * tried[0].runs or (present is not None and runs > present.rank[0])
        if len(orders) >= SHOWN or far:
            break
        for order in _best_of(list(alike), mine, other, change, pricing):
            # Of orders with equal numbers, only the closest to the present order is kept.
            known = {one.numbers.rank for one in orders}
            if order.numbers.rank not in known and _better(order, present, price):
                orders.append(order)
    orders.sort(key=lambda order: order.numbers.rank)
    if pricing is not None:
        orders = _by_price(orders)
    return Advice(change, len(tried), present, tuple(orders[:SHOWN]), price)


def _tried(
    several: Iterator[Candidate], mine: KVLayout, other: KVLayout, change: str, tell: Tell | None
) -> list[_Tried]:
    """Compile every candidate; return those that compile, in order of their runs per token."""
    few = _few_layers(mine, other)
    each = sum(len(part.other.components) for part in few)
    made = list(islice(several, max(LIMITS.advised // each, 1)))
    tried: list[_Tried] = []
    for k, candidate in enumerate(made):
        if tell is not None:
            tell(k / len(made), f"order {k + 1:,} of {len(made):,}")
        programs = _compiled(candidate, mine, change, few)
        if programs:
            runs = _grown([Fraction(p.runs, p.unit_tokens) for p in programs], other)
            tried.append(_Tried(runs, programs, candidate))
    tried.sort(key=lambda one: one.runs)
    return tried


def _better(order: Order, present: Numbers | None, price: Price | None) -> bool:
    """Return whether an order takes less time than the present one; if times are equal, whether its rank is better."""
    if present is None:
        return True
    if order.price is None or price is None:
        return order.numbers.rank < present.rank
    if order.price.seconds > price.seconds:
        return False
    return order.price.seconds < price.seconds * (1 - NEAR) or order.numbers.rank < present.rank


def _by_price(orders: Sequence[Order]) -> list[Order]:
    """Return orders by their predicted time. Of equal times, those without split axes come first."""
    least = min((order.price.seconds for order in orders if order.price is not None), default=0.0)

    def slow(order: Order) -> tuple[int, bool]:  # how often NEAR fits between the least time and this one
        seconds = order.price.seconds if order.price is not None else 0.0
        return int((seconds / least - 1) / NEAR) if least else 0, order.split

    return sorted(orders, key=slow)


def _best_of(
    tried: list[_Tried], mine: KVLayout, other: KVLayout, change: str, pricing: Pricing | None
) -> Iterator[Order]:
    """Compile equally good candidates with all layers; yield one order per number of extents, fewest first.

    With a pricing, the best order without split axes is among them: it is easier to read, and may take as long.
    """
    closest: dict[Fraction, Candidate] = {}
    plain: dict[Fraction, Candidate] = {}
    for one in sorted(tried, key=lambda one: (one.candidate.distance, notation_of(one.candidate, mine))):
        extents = [Fraction(p.extents(change)[0], p.unit_tokens) for p in one.programs]
        closest.setdefault(_grown(extents, other), one.candidate)
        if pricing is not None and "." not in notation_of(one.candidate, mine):
            plain.setdefault(_grown(extents, other), one.candidate)
    best = sorted(closest.items(), key=lambda one: one[0])[: SHOWN + 1]  # one may be the present order
    best += sorted(plain.items(), key=lambda one: one[0])[:1]
    for candidate in dict.fromkeys(candidate for _, candidate in best):
        spec = spec_of(candidate, mine, mine.layers)
        judged = _judged(KVLayout.from_spec(spec), other, change, pricing)
        page_sizes = sizes_of_page(candidate, mine) if candidate.shared else None
        yield Order(notation_of(candidate, mine), candidate.block_tokens, spec, *judged, page_sizes)


def numbers_of(program: Program, side: str) -> Numbers:
    """Return the numbers of a program; extents are counted on ``side`` (``"src"`` or ``"dst"``)."""
    return Numbers(
        program.unit_tokens, program.unit_nbytes, program.runs, program.run_nbytes, program.extents(side)
    )  # fmt: skip


def _judged(mine: KVLayout, other: KVLayout, change: str, pricing: Pricing | None) -> tuple[Numbers, Price | None]:
    """Compile a pair with all layers; return its numbers, and its price for the routes of the pricing."""
    src, dst = (mine, other) if change == "src" else (other, mine)
    program = compile_geometry(src.geometry, dst.geometry)
    if pricing is None:
        return numbers_of(program, change), None
    programs = {route: program if route == direction_of(src, dst) else compile_geometry(dst.geometry, src.geometry)
                for route in pricing.routes}  # fmt: skip
    return numbers_of(program, change), pricing.of(programs)


# ---- few layers stand for all --------------------------------------------------------------------------------


class _Layers(NamedTuple):
    """A number of layers of the side that may change, and the other side with the same number of layers."""

    mine: tuple[int, ...]
    other: KVLayout


def _few_layers(mine: KVLayout, other: KVLayout) -> tuple[_Layers, ...]:
    """Return the layers to compile: two small sets of layers if these determine the counts of all, otherwise all."""
    if len(other.layers) > FEW[1] and mine.layers == other.layers and evenly_layered(other):
        return tuple(_Layers(few, other.slice(layers=few)) for few in (mine.layers[:count] for count in FEW))
    return (_Layers(mine.layers, other),)


def _compiled(candidate: Candidate, mine: KVLayout, change: str, few: Sequence[_Layers]) -> tuple[Program, ...]:
    """Compile a candidate with each choice of layers; return () if one choice does not compile."""
    programs = []
    for part in few:
        try:
            layout = KVLayout.from_spec(spec_of(candidate, mine, part.mine))
            src, dst = (layout, part.other) if change == "src" else (part.other, layout)
            programs.append(passes(src.geometry, dst.geometry).program)
        except (IncompatibleLayoutsError, LayoutError):  # LayoutError: past the address space
            return ()
    return tuple(programs)


def _grown(counts: Sequence[Fraction], other: KVLayout) -> Fraction:
    """Compute the count of all layers from the counts of few layers."""
    if len(counts) == 1:
        return counts[0]
    return counts[1] + (len(other.layers) - FEW[1]) * (counts[1] - counts[0]) / (FEW[1] - FEW[0])
