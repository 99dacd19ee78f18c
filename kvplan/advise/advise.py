"""What order of one side would move in fewer runs: found by building the orders and compiling each."""

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

FEW = (2, 3)  # layers that are compiled where layers are alike: what two counts say grows by the same a layer
SHOWN = 3


class Numbers(NamedTuple):
    """What a program costs.

    Attributes:
        unit_tokens, unit_nbytes: tokens and bytes of a unit.
        runs, run_nbytes: contiguous copies of a unit; bytes of the smallest and of the largest.
        extents: contiguous stretches of a unit on the side that may change: how many, smallest, largest (bytes).
    """

    unit_tokens: int
    unit_nbytes: int
    runs: int
    run_nbytes: tuple[int, int]
    extents: tuple[int, int, int]

    @property
    def rank(self) -> tuple[Fraction, int]:
        """Runs a token, so that orders of different units compare; then extents a unit. Less is better."""
        return Fraction(self.runs, self.unit_tokens), self.extents[0]


class Order(NamedTuple):
    """One order of the side that may change, and what it would give.

    Attributes:
        notation: of it; of several parts that differ, each part's, joined by ``" + "``.
        block_tokens: token slots of its blocks.
        spec: what :meth:`kvplan.KVLayout.from_spec` builds it from.
        numbers: of its program.
    """

    notation: str
    block_tokens: int
    spec: dict[str, Any]
    numbers: Numbers


class Advice(NamedTuple):
    """The orders that would be better.

    Attributes:
        change: the side that may change: ``"src"`` or ``"dst"``.
        tried: orders that were compiled.
        present: what the pair gives as it is; None where it cannot be compiled.
        orders: at most three that are better, no two with equal numbers, the best first.
    """

    change: str
    tried: int
    present: Numbers | None
    orders: tuple[Order, ...]


class _Tried(NamedTuple):
    """A candidate, its runs a token with all layers, and the programs that tell them."""

    runs: Fraction
    programs: tuple[Program, ...]
    candidate: Candidate


def advise(src: KVLayout, dst: KVLayout, change: str) -> Advice:
    """Try the orders of one side of a pair, and keep the best.

    Tried are the permutations of layer, K/V, block, token and head in one allocation, and the other side's own order
    where that splits an axis, each at several block sizes. Better is: fewer runs a token, then fewer extents a unit
    on the side that changes, then closer to the present order.

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
            known = {one.numbers.rank for one in orders}  # of equal numbers only the closest to the present order
            better = present is None or order.numbers.rank < present.rank
            if len(orders) < SHOWN and better and order.numbers.rank not in known:
                orders.append(order)
    return Advice(change, len(tried), present, tuple(sorted(orders, key=lambda order: order.numbers.rank)))


def _best_of(tried: list[_Tried], mine: KVLayout, other: KVLayout, change: str) -> Iterator[Order]:
    """Of orders with equal runs a token, one for each number of extents, the fewest first; compiled with all layers."""
    closest: dict[Fraction, Candidate] = {}
    for one in sorted(tried, key=lambda one: (one.candidate.distance, notation_of(one.candidate))):
        closest.setdefault(_grown([Fraction(p.extents(change)[0]) for p in one.programs], other), one.candidate)
    for _, candidate in sorted(closest.items())[: SHOWN + 1]:  # one of them may be the present order
        spec = spec_of(candidate, mine, mine.layers)
        yield Order(
            notation_of(candidate), candidate.block_tokens, spec, _numbers(KVLayout.from_spec(spec), other, change)
        )


def numbers_of(program: Program, side: str) -> Numbers:
    """What a program costs; ``side`` (``"src"``, ``"dst"``) is where extents are counted."""
    return Numbers(
        program.unit_tokens, program.unit_nbytes, program.runs, program.run_nbytes, program.extents(side)
    )  # fmt: skip


def _numbers(mine: KVLayout, other: KVLayout, change: str) -> Numbers:
    src, dst = (mine, other) if change == "src" else (other, mine)
    return numbers_of(passes(src.geometry, dst.geometry).program, change)


# ---- few layers stand for all --------------------------------------------------------------------------------


class _Layers(NamedTuple):
    """The layers of the side that may change, and the other side with as many."""

    mine: tuple[int, ...]
    other: KVLayout


def _few_layers(mine: KVLayout, other: KVLayout) -> tuple[_Layers, ...]:
    """The first few layers, twice, where they tell how all of them go; else all."""
    if len(other.layers) > FEW[1] and mine.layers == other.layers and evenly_layered(other):
        return tuple(_Layers(few, other.slice(layers=few)) for few in (mine.layers[:count] for count in FEW))
    return (_Layers(mine.layers, other),)


def _compiled(candidate: Candidate, mine: KVLayout, change: str, few: Sequence[_Layers]) -> tuple[Program, ...]:
    """The candidate's programs with so many layers of the other side; () where it does not compile."""
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
    """What two counts with few layers become with all."""
    if len(counts) == 1:
        return counts[0]
    return counts[1] + (len(other.layers) - FEW[1]) * (counts[1] - counts[0]) / (FEW[1] - FEW[0])
