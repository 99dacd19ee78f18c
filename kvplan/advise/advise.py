"""Find the best order of axes for one side: score all orders by strides, compile the best, and compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from kvplan.advise.order_specs import Candidate, Pool
from kvplan.advise.orders import candidates
from kvplan.advise.prices import Price, Pricing
from kvplan.base.numbers import number_ranges
from kvplan.errors import IncompatibleLayoutsError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import direction_of
from kvplan.program.passes import compile_geometry
from kvplan.program.program import Program

SHOWN = 3
COMPILED = 8  # orders: the best ones by their strides
WORTH = 4  # an order is not shown if it takes this many times the runs of the best one
NEAR = 0.01  # times that differ by less than this share count as equal
MOST_BLOCK_TOKENS = 1024
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
        tried: number of orders that were compared.
        present: numbers of the present pair; None if the pair cannot be compiled.
        orders: at most three better orders with different numbers, the best first.
        price: the predicted time of the present pair; None without a pricing, or if the pair cannot be compiled.
        reason: why no order was tried; "" if some were.
    """

    change: str
    tried: int
    present: Numbers | None
    orders: tuple[Order, ...]
    price: Price | None = None
    reason: str = ""


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
    """Compare many orders of one side of a pair, and return the best ones.

    The orders are the permutations of layer, K/V, block, token and head, each with several block sizes, and with the
    tokens, heads and content split as the other side splits them. Parts and layers that differ have an allocation each,
    each in its best order, or one page for all of them. The best order has the least predicted time; if times are equal
    or not known, the fewest runs per token; then the fewest extents per token on the side that changes; then the
    nearest to "block layer kv token head dim". No order that takes longer than the present one is returned.

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
    ('block layer kv token head dim', 160, (8192, 8192), 1)
    """
    mine, other = (src, dst) if change == "src" else (dst, src)
    present, price = None, None
    if compare:
        try:
            present, price = _judged(mine, other, change, pricing)
        except IncompatibleLayoutsError:
            present = None
    if reason := _unlike(mine, other):
        return Advice(change, 0, present, (), price, reason)
    headed = any(component.form.headed for component in mine.components)
    pool = Pool(mine.device, mine.num_blocks * mine.block_tokens, mine.heads if headed else None)
    return search(other, pool, sizes or _block_sizes(mine, other), change, pricing, present, price, single, tell)


def search(
    other: KVLayout, pool: Pool, sizes: Sequence[int], change: str, pricing: Pricing | None,
    present: Numbers | None = None, price: Price | None = None, single: bool = False, tell: Tell | None = None,
) -> Advice:  # fmt: skip
    """Return the best orders of a pool for a layout, and better ones than the present order, if there is one."""
    orders_tried: list[Candidate] = []
    tried, reason = 0, ""
    for tokens in (other.block_tokens,) if other.opaque else sizes:
        try:
            some, count = candidates(other, pool, tokens)
        except LayoutError as error:
            reason = reason or str(error)
            continue
        orders_tried += [order for order in some if not single or order.shared or len(order.dims) == 1]
        tried += count
    orders: list[Order] = []
    shortlist = _shortlist(orders_tried, sizes[0])
    for k, candidate in enumerate(shortlist):
        if tell is not None:
            tell(k / len(shortlist), f"order {k + 1:,} of {len(shortlist):,}")
        try:
            spec = candidate.spec(pool)
            numbers = _judged(KVLayout.from_spec(spec), other, change, pricing)
        except (IncompatibleLayoutsError, LayoutError) as error:  # LayoutError: past the address space
            reason = reason or str(error)
            continue
        page = candidate.sizes if candidate.shared else None
        orders.append(Order(candidate.notation, candidate.block_tokens, spec, *numbers, page))
    if not orders:
        return Advice(change, 0, present, (), price, reason or "no order holds all parts in one allocation")
    orders.sort(key=lambda order: order.numbers.rank)
    best = orders[0].numbers.rank
    unlike = {order.numbers.rank: order for order in reversed(orders) if order.numbers.rank[0] <= WORTH * best[0]}
    better = [order for order in orders if unlike.get(order.numbers.rank) is order and _better(order, present, price)]
    return Advice(change, tried, present, tuple(_by_price(better)[:SHOWN]), price)


def _shortlist(orders: Iterable[Candidate], own: int) -> list[Candidate]:
    """Return the orders to compile: the best by runs and extents, and the best of those that split no axis.

    Of equal ones, those of the own block size come first.
    """
    ordered = sorted(orders, key=lambda order: (order.rank, order.block_tokens != own, order.far))
    whole = [order for order in ordered if not order.far[0]]
    return list(dict.fromkeys([*ordered[:COMPILED], *whole[:COMPILED]]))


def _unlike(mine: KVLayout, other: KVLayout) -> str:
    """Return why no order of a side holds what the other side holds; "" if some do."""
    missing, more = (sorted(set(a.layers) - set(b.layers)) for a, b in ((other, mine), (mine, other)))
    for layers, where in ((missing, "this side lacks"), (more, "the other side lacks")):
        if layers:
            return f"{where} layers {number_ranges(layers)}; slice them away: layout.slice(layers=...)"
    nbytes = [Fraction(side.block_nbytes, side.block_tokens) for side in (mine, other)]
    if mine.heads == other.heads and nbytes[0] != nbytes[1]:
        return f"this side holds {float(nbytes[0]):,.7g} bytes a token, and the other side {float(nbytes[1]):,.7g}"
    return ""


def _block_sizes(mine: KVLayout, other: KVLayout) -> tuple[int, ...]:
    """Return the block sizes to try, in token slots: of this side, of the other side, some halves and multiples."""
    own, its = other.block_tokens if mine.opaque else mine.block_tokens, other.block_tokens
    sizes = dict.fromkeys((own, own * 2, its, its * 2, its * 4, own // 2 if own % 2 == 0 else own))
    return tuple(size for size in sizes if size <= max(MOST_BLOCK_TOKENS, own))


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
        if order.price is None or not least:
            return 0, False
        return int((order.price.seconds / least - 1) / NEAR), order.split

    return sorted(orders, key=slow)


def numbers_of(program: Program, side: str) -> Numbers:
    """Return the numbers of a program; extents are counted on ``side`` (``"src"`` or ``"dst"``)."""
    return Numbers(
        program.unit_tokens, program.unit_nbytes, program.runs, program.run_nbytes, program.extents(side)
    )  # fmt: skip


def _judged(mine: KVLayout, other: KVLayout, change: str, pricing: Pricing | None) -> tuple[Numbers, Price | None]:
    """Compile a pair; return its numbers, and its price for the routes of the pricing."""
    src, dst = (mine, other) if change == "src" else (other, mine)
    program = compile_geometry(src.geometry, dst.geometry)
    if pricing is None:
        return numbers_of(program, change), None
    programs = {route: program if route == direction_of(src, dst) else compile_geometry(dst.geometry, src.geometry)
                for route in pricing.routes}  # fmt: skip
    return numbers_of(program, change), pricing.of(programs)
