"""``kvplan diff``: two layouts side by side, where they stop being contiguous together, and what would be better."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvplan.advise import Advice, Numbers, advise
from kvplan.cli.facts import extent_facts, layout_facts
from kvplan.cli.inspect import padding_words
from kvplan.cli.screen import binary, count_of, exact, fact_table, number_table, print_json, ranges, show
from kvplan.cli.sources import add_pair, pair_of
from kvplan.compare import Break, Onward, first_break, untouched
from kvplan.compiler import Passes, passes
from kvplan.errors import IncompatibleLayoutsError
from kvplan.explain import match_lines
from kvplan.layout import KVLayout
from kvplan.plan import direction_of

EXAMPLES = """examples:
  kvplan diff examples/specs/gpu_split_kv.toml examples/specs/host_token_major.toml
  kvplan diff examples/specs/gpu_split_kv.toml examples/specs/host_block_first.toml \\
      --change A
  kvplan diff "block token head dim" "block head token dim" \\
      --sizes block=64,token=16,head=8,dim=128

A is the source (SRC), B the destination (DST). Exit code 1: they cannot be compiled."""

NAMES = {"src": "A", "dst": "B"}
FACTS = (
    "notation", "dtype", "device", "layers", "parts", "heads", "num_blocks", "block_tokens", "token_nbytes",
    "block_nbytes", "padding_nbytes", "block_extents",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser)
    for action in parser._actions:
        if action.dest in ("source", "destination"):
            action.metavar = "A" if action.dest == "source" else "B"
    parser.add_argument("--change", choices=("A", "B"), help="the side that may change its order (default: the one on "
                        "the host, else B)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.diff)")


def run(args: argparse.Namespace) -> int:
    """Print the difference; a finding where the pair cannot be compiled."""
    src, dst = pair_of(args)
    found = difference_of(src, dst, args.change)
    if args.json:
        print_json("diff", _facts(found))
    else:
        _show(found)
    return int(found.made is None)


class Difference(NamedTuple):
    """Everything that is told of a pair; ``made`` and ``broken`` are None where it cannot be compiled."""

    src: KVLayout
    dst: KVLayout
    sides: dict[str, dict[str, Any]]
    made: Passes | None
    refused: str | None
    broken: Break | None
    advice: Advice


def difference_of(src: KVLayout, dst: KVLayout, change: str | None) -> Difference:
    """Work it out; ``change`` is the side that may change its order: A, B, or None for the one on the host, else B."""
    sides = {name: {key: facts[key] for key in (*FACTS, "padding")}
             for name, facts in (("src", layout_facts(src)), ("dst", layout_facts(dst)))}  # fmt: skip
    side = {"A": "src", "B": "dst", None: _may_change(src, dst)}[change]
    made, refused, broken = None, None, None
    try:
        made = passes(src.geometry, dst.geometry)
        broken = first_break(src, dst, made)
    except IncompatibleLayoutsError as error:
        refused = " ".join(str(error).split())
    return Difference(src, dst, sides, made, refused, broken, advise(src, dst, side))


def _may_change(src: KVLayout, dst: KVLayout) -> str:
    """The host's pool is ours to order, the engine's cache is not."""
    return "src" if src.device == "cpu" and dst.device != "cpu" else "dst"


# ---- as facts ------------------------------------------------------------------------------------------------


def _facts(found: Difference) -> dict[str, Any]:
    """The difference as plain facts; bytes unless the name says otherwise."""
    made = found.made
    return {
        "a": found.sides["src"],
        "b": found.sides["dst"],
        "differs": _differing(found.sides),
        "direction": direction_of(found.src, found.dst),
        "refused": found.refused,
        "matched": None if made is None else _matched(made),
        "program": None if made is None else _program(made),
        "first_break": None if found.broken is None else _broken(found.broken),
        "advice": _advice(found.advice),
    }


def _differing(sides: dict[str, dict[str, Any]]) -> list[str]:
    src, dst = sides["src"], sides["dst"]
    return [key for key in FACTS if src[key] != dst[key] and not (key == "dtype" and _alike(src[key], dst[key]))]


def _alike(dtype: str, other: str) -> bool:
    """Whether two names are of one dtype: torch's and numpy's, and the short ones of specs."""
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16"}
    return short.get(dtype, dtype) == short.get(other, other)


def _matched(made: Passes) -> dict[str, Any]:
    stay = list(untouched(made))
    return {
        "pairs": len(made.pairs),
        "layers": sorted({pair.layer for pair in made.pairs}),
        "parts": list(dict.fromkeys(pair.part for pair in made.pairs)),
        "heads": sorted({head for pair in made.pairs for head in pair.heads}),
        "a_keeps": [text for side, text in stay if side == "src"],
        "b_keeps": [text for side, text in stay if side == "dst"],
    }


def _program(made: Passes) -> dict[str, Any]:
    program = made.program
    return {
        "unit_tokens": program.unit_tokens,
        "unit_nbytes": program.unit_nbytes,
        "a_units": program.src_units,
        "b_units": program.dst_units,
        "runs": program.runs,
        "run_nbytes": list(program.run_nbytes),
        "alignment": program.alignment,
        "extents": {"a": extent_facts(program, "src"), "b": extent_facts(program, "dst")},
    }


def _broken(broken: Break) -> dict[str, Any]:
    start = broken.start._asdict()
    return {
        "nbytes": broken.nbytes,
        "start": start,
        "holds": broken.holds,
        "a": _onward(broken.src),
        "b": _onward(broken.dst),
        "axis": broken.axis,
    }


def _onward(side: Onward) -> dict[str, Any]:
    return side._asdict()


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "change": NAMES[advice.change],
        "tried": advice.tried,
        "present": None if advice.present is None else _numbers(advice.present),
        "orders": [
            {"notation": order.notation, "block_tokens": order.block_tokens, **_numbers(order.numbers),
             "spec": order.spec}
            for order in advice.orders
        ],
    }  # fmt: skip


def _numbers(numbers: Numbers) -> dict[str, Any]:
    count, least, most = numbers.extents
    return {
        "unit_tokens": numbers.unit_tokens,
        "unit_nbytes": numbers.unit_nbytes,
        "runs": numbers.runs,
        "run_nbytes": list(numbers.run_nbytes),
        "extents": {"count": count, "min_nbytes": least, "max_nbytes": most},
    }


# ---- for people ----------------------------------------------------------------------------------------------


FACT_HEADER = ("* differs", "", "A", "B")


def _show(found: Difference) -> None:
    facts = number_table(FACT_HEADER, fact_rows(found), right=())
    show(facts, fact_table([*told_rows(found), *advice_rows(found)]))


def fact_rows(found: Difference) -> list[tuple[str, ...]]:
    """Facts of both sides, under :data:`FACT_HEADER`."""
    differs = _differing(found.sides)
    return [
        (
            name,
            "*" if key in differs else "",
            *(_said(key, found.sides[side], getattr(found, side)) for side in NAMES),
        )
        for key, name in zip(FACTS, _FACT_NAMES, strict=True)
    ]


_FACT_NAMES = (
    "layout", "dtype", "device", "layers", "parts", "heads", "blocks", "tokens each", "a token", "a block", "padding",
    "contiguous",
)  # fmt: skip


def _said(key: str, facts: dict[str, Any], layout: KVLayout) -> str:
    value = facts[key]
    if key == "heads" and not any(component.form.headed for component in layout.components):
        return "no axis of heads"
    if key in ("layers", "heads"):
        return f"{len(value):,} ({ranges(value)})"
    if key == "parts":
        return ", ".join(value)
    if key == "block_extents":
        return _times(value["count"], value["min_nbytes"], value["max_nbytes"])
    if key == "padding_nbytes":
        return padding_words(facts)
    if value is None:
        return "none: moves whole"
    if key.endswith("nbytes"):
        return exact(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def told_rows(found: Difference) -> Iterator[tuple[str, str]]:
    """What is matched, and where the sides part."""
    if found.made is None or found.broken is None:
        yield "no program", found.refused or ""
        return
    program, broken = found.made.program, found.broken
    pairs, *heads = match_lines(found.made.pairs)
    yield "matched", pairs
    for line in heads if any(pair.src.form.headed for pair in found.made.pairs) else ():
        yield "", line
    for side, line in untouched(found.made):
        yield f"in {NAMES[side]}", line
    units = f"; {program.src_units} a block of A, {program.dst_units} a block of B"
    tokens = "a block" if found.src.opaque else count_of(program.unit_tokens, "token")
    yield "unit", f"{tokens}, {exact(program.unit_nbytes)}{units}"
    yield "runs", f"a unit is {_times(program.runs, *program.run_nbytes, 'run')}"
    for side, name in NAMES.items():
        yield "extents" if side == "src" else "", f"a unit is {_times(*program.extents(side))} in {name}"
    if broken.axis is None:
        yield "equal", f"one run a {'block' if program.src_units == program.dst_units == 1 else 'unit'}"
        yield "after it", f"A {broken.src.text}, B {broken.dst.text}"
        return
    start = f"layer {broken.start.layer} {broken.start.part}"
    yield "breaks", f"the first run, of {start}, ends after {exact(broken.nbytes)}: {broken.holds}"
    yield "", f"then A {broken.src.text}"
    yield "", f"and B {broken.dst.text}"
    yield "axis", broken.axis


def advice_rows(found: Difference) -> Iterator[tuple[str, str]]:
    """What would be better."""
    advice = found.advice
    name, layout = NAMES[advice.change], getattr(found, advice.change)
    orders = count_of(advice.tried, "order")
    if not advice.orders:
        if advice.present is None:
            yield "better", f"no order of {name} would make them meet"
        else:
            yield "better", f"nothing: {name} is as good as any of {orders} that were tried"
        return
    yield "better", f"for {name}, on the {'host' if layout.device == 'cpu' else 'device'}; {orders} tried:"
    for order in advice.orders:
        blocks = f", blocks of {count_of(order.block_tokens, 'token')}" * (order.block_tokens != layout.block_tokens)
        yield "", f"{order.notation}{blocks}"
        yield "", f"  {_instead(order.numbers, advice.present)}"


def _instead(numbers: Numbers, present: Numbers | None) -> str:
    """What an order gives, and what it gives instead of."""
    gives, extents = _times(numbers.runs, *numbers.run_nbytes, "run"), numbers.extents
    if present is None:
        return f"{gives}, {_times(*extents)}"
    if numbers.unit_tokens != present.unit_tokens:
        gives += f" a unit of {count_of(numbers.unit_tokens, 'token')}"
    if numbers.rank[0] != present.rank[0] or numbers.unit_tokens != present.unit_tokens:
        was = _times(present.runs, *present.run_nbytes, "run")
        return f"{gives} instead of {was}; {count_of(extents[0], 'extent')}"
    return f"{gives}, {_times(*extents)} instead of {present.extents[0]:,}"


def _times(count: int, least: int, most: int, noun: str = "extent") -> str:
    """So many of such sizes: ``160 extents of 8 KiB``."""
    size = binary(most) if least == most else f"{least:,} to {exact(most)}"
    return f"{count_of(count, noun)} of {size}"
