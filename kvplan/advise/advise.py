"""Find the best order of axes for one side: score all orders by strides, compile the best, and compare them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from kvplan.advise.orders import Candidate, Pool, candidates
from kvplan.base.numbers import number_ranges
from kvplan.errors import IncompatibleLayoutsError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.program.passes import compile_geometry
from kvplan.program.program import Program

SHOWN = 3
COMPILED = 8  # orders: the best ones by their strides
WORTH = 4  # an order is not shown if it takes this many times the runs of the best one
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
        sizes: extents of split axes of a page; None if it is no page of several parts.
    """

    notation: str
    block_tokens: int
    spec: dict[str, Any]
    numbers: Numbers
    sizes: dict[str, int] | None = None


class Advice(NamedTuple):
    """The orders that are better than the present order.

    Attributes:
        change: the side that may change: ``"src"`` or ``"dst"``.
        tried: number of orders that were compared.
        present: numbers of the present pair; None if there is none, or it cannot be compiled.
        orders: at most three better orders with different numbers, the best first.
        reason: why no order was tried; "" if some were.
    """

    change: str
    tried: int
    present: Numbers | None
    orders: tuple[Order, ...]
    reason: str = ""


class Wanted(NamedTuple):
    """The pool that is looked for; None stands for what the layout has. More layers make no difference to the order.

    Attributes:
        block_tokens: token slots per block.
        heads: global numbers of its KV heads.
        device: where the pool lies.
        single: whether all parts must be in one allocation.
    """

    block_tokens: int | None = None
    heads: range | None = None
    device: str = "cpu"
    single: bool = False


def host_orders(layout: KVLayout, wanted: Wanted = Wanted(), tell: Tell | None = None) -> Advice:  # noqa: B008  # immutable
    """Return the best orders of a pool that holds a layout's content.

    Args:
        layout: the layout that does not change, such as an engine's cache.
        wanted: the pool.
        tell: called with the share of the work that is done, and a text.

    >>> spec = {"notation": "layer: kv block head dim.0 token dim.1", "device": "cuda:0",
    ...         "sizes": {"layer": 32, "block": 64, "token": 16, "head": 8, "dim": 128, "dim.1": 8}}
    >>> best = host_orders(KVLayout.from_spec(spec), Wanted(block_tokens=64)).orders[0]
    >>> best.notation, best.block_tokens, best.numbers.run_nbytes
    ('block token.0 layer kv head dim.0 token.1 dim.1', 64, (32768, 32768))
    """
    pool = Pool(wanted.device, layout.num_blocks * layout.block_tokens, wanted.heads)
    return _search(layout, pool, (wanted.block_tokens or layout.block_tokens,), "dst", single=wanted.single, tell=tell)


def advise(
    src: KVLayout, dst: KVLayout, change: str, sizes: tuple[int, ...] = (), tell: Tell | None = None
) -> Advice:  # fmt: skip
    """Compare many orders of one side of a pair, and return those that are better than the present one.

    The orders are the permutations of layer, K/V, block, token and head, each with several block sizes, and with the
    tokens, heads and content split as the other side splits them. Parts and layers that differ have an allocation each,
    each in its best order, or one page for all of them. The best order has the fewest runs per token; then the fewest
    extents per token on the side that changes; then it is the nearest to "block layer kv token head dim".

    Args:
        src, dst: the layouts.
        change: the side that may change, ``"src"`` or ``"dst"``.
        sizes: token slots per block to try; by default several.
        tell: called with the share of the work that is done, and a text.

    >>> sizes = {"layer": 80, "block": 64, "token": 16, "head": 2, "dim": 128}
    >>> gpu, host = (KVLayout.from_spec({"notation": n, "sizes": sizes})
    ...              for n in ("layer: kv block token head dim", "kv (block token) layer head dim"))
    >>> best = advise(gpu, host, "dst").orders[0]
    >>> best.notation, best.numbers.runs, best.numbers.run_nbytes, best.numbers.extents[0]
    ('block layer kv token head dim', 160, (8192, 8192), 1)
    """
    mine, other = (src, dst) if change == "src" else (dst, src)
    try:
        present = _judged(mine, other, change)
    except IncompatibleLayoutsError:
        present = None
    if reason := _unlike(mine, other):
        return Advice(change, 0, present, (), reason)
    headed = any(component.form.headed for component in mine.components)
    pool = Pool(
        mine.device,
        mine.num_blocks * mine.block_tokens,
        mine.heads if headed and isinstance(mine.heads, range) else None,
    )
    return _search(other, pool, sizes or _block_sizes(mine, other), change, present, tell=tell)


def _search(
    other: KVLayout, pool: Pool, sizes: Sequence[int], change: str, present: Numbers | None = None, *,
    single: bool = False, tell: Tell | None = None,
) -> Advice:  # fmt: skip
    """Return the best orders of a pool for a layout, and better ones than the present order, if there is one."""
    listed: list[Candidate] = []
    orders: list[Order] = []
    tried, reason = 0, ""
    for tokens in (other.block_tokens,) if other.opaque else sizes:
        try:
            some, count = candidates(other, pool, tokens)
        except LayoutError as error:
            reason = reason or str(error)
        else:
            listed += [order for order in some if not single or order.shared or len(order.dims) == 1]
            tried += count
    # Of equal orders, those of the own block size come first.
    listed.sort(key=lambda order: (order.rank, order.block_tokens != sizes[0], order.far))
    for k, candidate in enumerate(listed[:COMPILED]):
        if tell is not None:
            tell(k / COMPILED, f"order {k + 1:,} of {min(len(listed), COMPILED):,}")
        try:
            spec = candidate.spec(pool)
            numbers = _judged(KVLayout.from_spec(spec), other, change)
        except (IncompatibleLayoutsError, LayoutError) as error:  # LayoutError: past the address space
            reason = reason or str(error)
        else:
            page = candidate.sizes if candidate.shared else None
            orders.append(Order(candidate.notation, candidate.block_tokens, spec, numbers, page))
    if not orders:
        return Advice(change, 0, present, (), reason or "no order holds all parts in one allocation")
    orders.sort(key=lambda order: order.numbers.rank)
    distinct = {order.numbers.rank: order for order in reversed(orders)}
    most = WORTH * orders[0].numbers.rank[0]
    better = [
        distinct[rank] for rank in sorted(distinct) if rank[0] <= most and (present is None or rank < present.rank)
    ]
    return Advice(change, tried, present, tuple(better[:SHOWN]))


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


def numbers_of(program: Program, side: str) -> Numbers:
    """Return the numbers of a program; extents are counted on ``side`` (``"src"`` or ``"dst"``)."""
    facts = program.unit_tokens, program.unit_nbytes, program.runs, program.run_nbytes
    return Numbers(*facts, program.extents(side))


def _judged(mine: KVLayout, other: KVLayout, change: str) -> Numbers:
    src, dst = (mine, other) if change == "src" else (other, mine)
    return numbers_of(compile_geometry(src.geometry, dst.geometry), change)
