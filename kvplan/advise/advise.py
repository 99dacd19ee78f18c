"""Find the order of axes on one side that gives the fewest runs: build each order, compile it, and compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import groupby, islice
from typing import Any, NamedTuple

from kvplan.advise.compare import evenly_layered
from kvplan.advise.orders import Candidate, candidates, notation_of, spec_of
from kvplan.base.limits import LIMITS
from kvplan.errors import IncompatibleLayoutsError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.program.passes import passes
from kvplan.program.program import Program

FEW = (2, 3)  # layers to compile if layers are equal: each further layer adds the difference of these two
SHOWN = 3


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
    def rank(self) -> tuple[Fraction, int]:
        """Return runs per token (for orders with different units), then extents per unit; smaller is better."""
        return Fraction(self.runs, self.unit_tokens), self.extents[0]


class Order(NamedTuple):
    """One order of axes for the side that may change, with the numbers of its program.

    Attributes:
        notation: the order's notation; if parts differ, each part's notation, joined by ``" + "``.
        block_tokens: token slots per block.
        spec: the spec from which :meth:`kvplan.KVLayout.from_spec` builds it.
        numbers: numbers of its program.
    """

    notation: str
    block_tokens: int
    spec: dict[str, Any]
    numbers: Numbers


class Advice(NamedTuple):
    """The orders that are better than the present order.

    Attributes:
        change: the side that may change: ``"src"`` or ``"dst"``.
        tried: number of orders that were compiled.
        present: numbers of the present pair; None if the pair cannot be compiled.
        orders: at most three better orders with different numbers, the best first.
    """

    change: str
    tried: int
    present: Numbers | None
    orders: tuple[Order, ...]


class _Tried(NamedTuple):
    """A candidate, its runs per token with all layers, and the programs from which they were counted."""

    runs: Fraction
    programs: tuple[Program, ...]
    candidate: Candidate


def advise(src: KVLayout, dst: KVLayout, change: str) -> Advice:
    """Compile the pair with many orders of one side, and return the best orders.

    The candidates are the permutations of layer, K/V, block, token and head in one allocation, each with several block
    sizes. The other side's own order is also a candidate if it splits an axis. The best order has the fewest runs per
    token; then the fewest extents per unit on the side that changes; then the least distance from the present order.

    Args:
        src, dst: the layouts.
        change: the side that may change, ``"src"`` or ``"dst"``.

    >>> sizes = {"layer": 80, "block": 64, "token": 16, "head": 2, "dim": 128}
    >>> gpu, host = (KVLayout.from_spec({"notation": n, "sizes": sizes})
    ...              for n in ("layer: kv block token head dim", "kv (block token) layer head dim"))
    >>> best = advise(gpu, host, "dst").orders[0]
    >>> best.notation, best.numbers.runs, best.numbers.run_nbytes, best.numbers.extents[0]
    ('block kv layer token head dim', 160, (8192, 8192), 1)
    """
    mine, other = (src, dst) if change == "src" else (dst, src)
    try:
        present = _numbers(mine, other, change)
    except IncompatibleLayoutsError:
        present = None
    few = _few_layers(mine, other)
    tried: list[_Tried] = []
    each = sum(len(part.other.components) for part in few)
    for candidate in islice(candidates(mine, other, refused=present is None), LIMITS.advised // each):
        programs = _compiled(candidate, mine, change, few)
        if programs:
            runs = _grown([Fraction(p.runs, p.unit_tokens) for p in programs], other)
            tried.append(_Tried(runs, programs, candidate))
    tried.sort(key=lambda one: one.runs)
    orders: list[Order] = []
    for runs, alike in groupby(tried, key=lambda one: one.runs):
        if len(orders) == SHOWN or (present is not None and runs > present.rank[0]):
            break
        for order in _best_of(list(alike), mine, other, change):
            known = {
                one.numbers.rank for one in orders
            }  # of orders with equal numbers, only the closest to the present order
            better = present is None or order.numbers.rank < present.rank
            if len(orders) < SHOWN and better and order.numbers.rank not in known:
                orders.append(order)
    return Advice(change, len(tried), present, tuple(sorted(orders, key=lambda order: order.numbers.rank)))


def _best_of(tried: list[_Tried], mine: KVLayout, other: KVLayout, change: str) -> Iterator[Order]:
    """Compile equally good candidates with all layers; yield one order per number of extents, fewest first."""
    closest: dict[Fraction, Candidate] = {}
    for one in sorted(tried, key=lambda one: (one.candidate.distance, notation_of(one.candidate))):
        closest.setdefault(_grown([Fraction(p.extents(change)[0]) for p in one.programs], other), one.candidate)
    for _, candidate in sorted(closest.items())[: SHOWN + 1]:  # one may be the present order
        spec = spec_of(candidate, mine, mine.layers)
        yield Order(
            notation_of(candidate), candidate.block_tokens, spec, _numbers(KVLayout.from_spec(spec), other, change)
        )


def numbers_of(program: Program, side: str) -> Numbers:
    """Return the numbers of a program; extents are counted on ``side`` (``"src"`` or ``"dst"``)."""
    return Numbers(
        program.unit_tokens, program.unit_nbytes, program.runs, program.run_nbytes, program.extents(side)
    )  # fmt: skip


def _numbers(mine: KVLayout, other: KVLayout, change: str) -> Numbers:
    src, dst = (mine, other) if change == "src" else (other, mine)
    return numbers_of(passes(src.geometry, dst.geometry).program, change)


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
