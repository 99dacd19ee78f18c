"""Put the difference of two layouts into rows of words, for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvplan.advise.advise import Numbers, Order
from kvplan.advise.compare import OUTSIDE, untouched
from kvplan.base.numbers import binary, count_of, exact, number_ranges
from kvplan.cli.answers.difference import FACTS, NAMES, Difference, differing
from kvplan.cli.answers.layout_rows import padding_words
from kvplan.layout.kvlayout import KVLayout
from kvplan.program.explain import match_lines
from kvplan.program.program import Program

FACT_HEADER = ("* differs", "", "A", "B")
_FACT_NAMES = (
    "layout", "dtype", "device", "addresses", "layers", "parts", "heads", "blocks", "tokens each", "a token", "a block",
    "padding", "contiguous",
)  # fmt: skip
_WHOSE = {"memory": "of this process", "dump": "of the process that saved it", "spec": "made up"}


def fact_rows(found: Difference) -> list[tuple[str, ...]]:
    """Return the facts of both sides as rows, under :data:`FACT_HEADER`."""
    differs = differing(found.sides)
    return [
        (name, "*" * (key in differs), *(_said(key, found.sides[side], getattr(found, side)) for side in NAMES))
        for key, name in zip(FACTS, _FACT_NAMES, strict=True)
    ]


def _said(key: str, facts: dict[str, Any], layout: KVLayout) -> str:
    value = facts[key]
    if key == "heads" and not any(component.form.headed for component in layout.components):
        return "no axis of heads"
    if key in ("layers", "heads"):
        return f"{len(value):,} ({number_ranges(value, ', ')})"
    if key == "addresses":
        return _WHOSE[str(value)]
    if key == "parts":
        return ", ".join(value)
    if key == "block_extents":
        return _times(value["count"], value["min_nbytes"], value["max_nbytes"])
    if key == "padding_nbytes":
        return padding_words(facts)
    if value is None:
        return "none: moves whole"
    if key == "block_tokens" and layout.opaque and value > 1:
        return count_of(value, "sub-block")
    if key.endswith("nbytes"):
        return exact(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def told_rows(found: Difference) -> Iterator[tuple[str, str]]:
    """Return rows with the matched parts, and the place where the first run ends."""
    if found.made is None or found.broken is None:
        yield "no program", (found.refused or "").replace("the source", "A").replace("the destination", "B")
        return
    program, broken = found.made.program, found.broken
    pairs, *heads = match_lines(found.made.pairs, ("A", "B"))
    yield "matched", pairs
    for line in heads if any(pair.src.form.headed for pair in found.made.pairs) else ():
        yield "", line
    for side, line in untouched(found.made):
        yield f"in {NAMES[side]}", line
    yield from _unit_rows(found, program)
    if broken.axis is None:
        yield "equal", f"one run a {'block' if program.src_units == program.dst_units == 1 else 'unit'}"
        yield "after it", f"A {broken.src.text}, B {broken.dst.text}"
        return
    start = f"layer {broken.start.layer} {broken.start.part}"
    yield "breaks", f"the first run, of {start}, ends after {exact(broken.nbytes)}: {broken.holds}"
    yield "", f"then A {broken.src.text}"
    yield "", f"and B {broken.dst.text}"
    outside = all(side.axis in OUTSIDE and not side.lacked for side in (broken.src, broken.dst))
    left = f": A and B leave the unit there, its next run is of another {broken.axis}"
    yield "axis", f"{broken.axis}{left if outside else ''}"


def _unit_rows(found: Difference, program: Program) -> Iterator[tuple[str, str]]:
    """Return rows about a unit on both sides, with a line for each part that differs from the other parts."""
    units = f"; {program.src_units} a block of A, {program.dst_units} a block of B"
    yield "unit", f"{_unit(program, opaque=found.src.opaque)}{units}"
    for one in found.parts:
        yield "", f"of {', '.join(one.parts)}: {_unit(one.program, opaque=one.opaque)}"
    yield "runs", f"a unit is {_times(program.runs, *program.run_nbytes, 'run')}"
    for one in found.parts:
        yield "", f"of {', '.join(one.parts)}: {_times(one.program.runs, *one.program.run_nbytes, 'run')}"
    for side, name in NAMES.items():
        yield "extents" if side == "src" else "", f"a unit is {_times(*program.extents(side))} in {name}"
        for one in found.parts:
            yield "", f"of {', '.join(one.parts)}: {_times(*one.program.extents(side))} in {name}"


def _unit(program: Program, *, opaque: bool) -> str:
    whole = "a block whole" if program.unit_words == "1 whole block" else f"{program.unit_words} whole"
    return f"{whole if opaque else count_of(program.unit_tokens, 'token')}, {exact(program.unit_nbytes)}"


def advice_rows(found: Difference) -> Iterator[tuple[str, str]]:
    """Return rows with better orders; none if no advice was asked for."""
    advice = found.advice
    if advice is None:
        return
    name, layout = NAMES[advice.change], getattr(found, advice.change)
    orders = count_of(advice.tried, "order")
    if advice.orders:
        yield "better", f"for {name}, on the {_where(layout)}; {orders} tried:"
        for order in advice.orders:
            yield "", _named(order, layout)
            for line in _instead(order.numbers, advice.present):
                yield "", f"  {line}"
    elif advice.present is None:
        yield "better", f"no order of {name} would make the pair compile"
    else:
        yield "better", f"nothing: {name} is as good as any of {orders} that were tried"
    if found.other is not None:
        name, layout = NAMES[found.other.change], getattr(found, found.other.change)
        best = min(found.other.orders, key=lambda order: order.numbers.rank)
        gives = _given(best.numbers, found.other.present)
        yield "or", f"for {name}, on the {_where(layout)}: {_named(best, layout)}: {gives} (--change {name})"


def _where(layout: KVLayout) -> str:
    return "host" if layout.device == "cpu" else "device"


def _named(order: Order, layout: KVLayout) -> str:
    blocks = f", blocks of {count_of(order.block_tokens, 'token')}" * (order.block_tokens != layout.block_tokens)
    return f"{order.notation}{blocks}"


def _instead(numbers: Numbers, present: Numbers | None) -> Iterator[str]:
    """Compare an order with the present order, on two lines if their units differ in size."""
    extents = numbers.extents
    if present is None:
        yield f"{_given(numbers, present)}, {_times(*extents)}"
    elif numbers.unit_tokens != present.unit_tokens:
        yield f"{_given(numbers, present)}; {count_of(extents[0], 'extent')}"
        yield f"instead of {_given(present, numbers)}; {count_of(present.extents[0], 'extent')}"
    elif numbers.rank[0] != present.rank[0]:
        was = _times(present.runs, *present.run_nbytes, "run")
        yield f"{_given(numbers, present)} instead of {was}; {count_of(extents[0], 'extent')}"
    else:
        yield f"{_given(numbers, present)}, {_times(*extents)} instead of {present.extents[0]:,}"


def _given(numbers: Numbers, beside: Numbers | None) -> str:
    """Return the runs of a unit as text, with its size if the two orders differ in it."""
    unlike = beside is not None and numbers.unit_tokens != beside.unit_tokens
    unit = f" a unit of {count_of(numbers.unit_tokens, 'token')}" * unlike
    return f"{_times(numbers.runs, *numbers.run_nbytes, 'run')}{unit}"


def _times(count: int, least: int, most: int, noun: str = "extent") -> str:
    """Return a count with its sizes as text: ``160 extents of 8 KiB``."""
    size = binary(most) if least == most else f"{least:,} to {exact(most)}"
    return f"{count_of(count, noun)} of {size}"
