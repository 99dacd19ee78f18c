"""Compare two layouts: their facts, their programs, the place where common runs end, and advice."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvplan.advise.advise import Advice, Tell, advise
from kvplan.advise.compare import Break, first_break
from kvplan.advise.host_order import pricing_for
from kvplan.cli.answers.layout_facts import layout_facts
from kvplan.cost.store import profile_of
from kvplan.errors import IncompatibleLayoutsError, LayoutError
from kvplan.layout.dtypes import kind_of
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import direction_of
from kvplan.program.element_types import check_element_types
from kvplan.program.passes import Passes, passes
from kvplan.program.program import Program

NAMES = {"src": "A", "dst": "B"}
FACTS = (
    "notation", "dtype", "device", "addresses", "layers", "parts", "heads", "num_blocks", "block_tokens",
    "token_nbytes", "block_nbytes", "padding_nbytes", "block_extents",
)  # fmt: skip


class PartProgram(NamedTuple):
    """The copy program of parts that compile alike, without the other parts.

    Attributes:
        parts: names of the parts, in order.
        opaque: whether their blocks move whole, so that a unit is a block.
        program: the program of one of these parts.
    """

    parts: tuple[str, ...]
    opaque: bool
    program: Program


class Difference(NamedTuple):
    """All that ``kvplan diff`` says about a pair.

    Attributes:
        made, broken: passes, and the end of the first run; None if the pair cannot be compiled.
        parts: one program for each kind of part if parts compile differently; otherwise empty.
        advice: advice for the side that may change; None if it was not asked for.
        other: advice for the other side if it would take fewer runs than ``advice``; otherwise None.
    """

    src: KVLayout
    dst: KVLayout
    sides: dict[str, dict[str, Any]]
    made: Passes | None
    refused: str | None
    broken: Break | None
    parts: tuple[PartProgram, ...]
    advice: Advice | None
    other: Advice | None


def difference_of(
    src: KVLayout,
    dst: KVLayout,
    change: str | None = None,
    *,
    reinterpret: bool = False,
    advice: bool = True,
    tell: Tell | None = None,
) -> Difference:
    """Compare a pair.

    Args:
        src, dst: the layouts.
        change: the side that may change its order: A, B, or None for the host's, else B.
        reinterpret: whether number formats may differ.
        advice: whether to search better orders, which takes most of the time.
        tell: called with the share of the search that is done, and a text.
    """
    sides = {name: {key: facts[key] for key in (*FACTS, "padding")}
             for name, facts in (("src", layout_facts(src)), ("dst", layout_facts(dst)))}  # fmt: skip
    side = {"A": "src", "B": "dst", None: _may_change(src, dst)}[change]
    made, refused, broken = None, None, None
    try:
        if not reinterpret:
            check_element_types(src.geometry, dst.geometry)
        made = passes(src.geometry, dst.geometry)
        broken = first_break(src, dst, made)
    except IncompatibleLayoutsError as error:
        refused = " ".join(str(error).split())
    found, other = None, None
    if advice:
        found = _advised(src, dst, side, tell)
        other = None if change else _better(found, _advised(src, dst, "dst" if side == "src" else "src", tell))
    parts = () if made is None else _part_programs(src, dst)
    return Difference(src, dst, sides, made, refused, broken, parts, found, other)


def _advised(src: KVLayout, dst: KVLayout, change: str, tell: Tell | None) -> Advice:
    """Return the advice for one side, by the predicted time of the pair's own direction."""
    stays, moves = (dst, src) if change == "src" else (src, dst)
    pricing = pricing_for(stays, moves.device, profile_of(None)[0], directions=(direction_of(src, dst),))
    return advise(src, dst, change, pricing=pricing, tell=tell)


def _may_change(src: KVLayout, dst: KVLayout) -> str:
    """Return the side on the host: its order can change, and the order of the engine cannot."""
    return "src" if src.device == "cpu" and dst.device != "cpu" else "dst"


def _better(advice: Advice, other: Advice) -> Advice | None:
    """Return the advice for the other side if it takes fewer runs per token than any order of this side."""
    known = [numbers.rank[0] for numbers in (advice.present, *(order.numbers for order in advice.orders)) if numbers]
    best = min((order.numbers.rank[0] for order in other.orders), default=None)
    return other if best is not None and best < min(known, default=best + 1) else None


def _part_programs(src: KVLayout, dst: KVLayout) -> tuple[PartProgram, ...]:
    """Compile each part of both sides alone. Return no program if all agree in units, runs and extents."""
    kinds: dict[tuple[Any, ...], PartProgram] = {}
    for part in (part for part in src.parts if part in dst.parts):
        try:
            held = [side.slice(parts=(part,)) for side in (src, dst)]
            program = passes(held[0].geometry, held[1].geometry).program
        except (IncompatibleLayoutsError, LayoutError):  # this part cannot be compiled without the others
            return ()
        key = (held[0].opaque, program.unit_tokens, program.unit_nbytes, program.runs, program.run_nbytes,
               program.extents("src"), program.extents("dst"))  # fmt: skip
        known = kinds.get(key, PartProgram((), held[0].opaque, program))
        kinds[key] = known._replace(parts=(*known.parts, part))
    return tuple(kinds.values()) if len(kinds) > 1 else ()


def differing(sides: dict[str, dict[str, Any]]) -> list[str]:
    """Return the keys of :data:`FACTS` whose values differ."""
    src, dst = sides["src"], sides["dst"]
    return [key for key in FACTS if src[key] != dst[key] and not (key == "dtype" and _alike(src[key], dst[key]))]


def _alike(dtype: str, other: str) -> bool:
    """Return whether two names mean one dtype: names of torch, of numpy, and the short ones of specs."""
    return dtype == other or kind_of(dtype) == kind_of(other) != ""
