"""Facts of transfers between machines: what requests of the catalogue's models take, direct and packed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvplan.base.numbers import duration
from kvplan.catalogue.models import Model
from kvplan.cli.answers.layout_facts import picked
from kvplan.cost.wires.scale import Change, Engine, Prefill, changes_of, prefills_of
from kvplan.cost.wires.wire_profile import WireProfile

WIRE = ("wire", "memory", "how", "made", "latency", "post", "descriptor", "message", "byte", "slots", "slot_nbytes",
        "note")  # fmt: skip


class Row(NamedTuple):
    """A row of the table: one request of one model between two kinds of ranks.

    Attributes:
        ranks: the ranks of both sides.
        tokens: tokens of the request, as in ``"32k"``.
        nbytes, descriptors: of the rank that receives the most.
        each: bytes of a descriptor.
        direct, packed: times, over all wires.
        messages: messages of the packed transfer.
    """

    ranks: str
    tokens: str
    nbytes: int
    descriptors: int
    each: int
    direct: str
    packed: str
    messages: int


def wires_facts(
    models: Iterable[Model], engines: Sequence[Engine], lengths: Sequence[int], wires: Sequence[WireProfile]
) -> dict[str, Any]:  # fmt: skip
    """Return every request as plain facts; times are seconds, numbers are bytes unless the name says otherwise.

    Args:
        models: models of the catalogue.
        engines: layouts of both sides. Layouts of latents that are the same for two engines are counted once.
        lengths: tokens of each request.
        wires: profiles of wires.
    """
    rows = [
        _row(model, engine, change, tokens, made, wires)
        for model in models
        for engine in _different(model, engines)
        for change in changes_of(model)
        for tokens, made in zip(lengths, prefills_of(model, change, lengths, engine), strict=True)
    ]
    return {"wires": [picked(wire, WIRE) for wire in wires], "transfers": rows}


def _different(model: Model, engines: Sequence[Engine]) -> Sequence[Engine]:
    """Return the engines whose layouts of this model differ: latents have one order in all of them."""
    return engines if any(group.kind == "mha" for group in model.groups) else engines[:1]


def _row(
    model: Model, engine: Engine, change: Change, tokens: int, made: Prefill, wires: Sequence[WireProfile]
) -> dict[str, Any]:  # fmt: skip
    busiest = made.busiest
    return {
        "model": model.name,
        "engine": engine.name if any(group.kind == "mha" for group in model.groups) else "any",
        "prefill": str(change.prefill),
        "decode": str(change.decode),
        "tokens": tokens,
        "nbytes": busiest.nbytes,
        "peers": busiest.pairs,
        "descriptors": busiest.descriptors,
        "descriptor_nbytes": busiest.descriptor_nbytes,
        "direct_seconds": [_digits(made.direct(wire)) for wire in wires],
        "packed_seconds": [_digits(made.packed(wire)) for wire in wires],
        "packed_messages": max(made.messages(wire) for wire in wires),
    }


def _digits(seconds: float) -> float:
    """Round to four digits: the model is no more precise."""
    return float(f"{seconds:.4g}")


def tables(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield the model, the engine and the rows of each table."""
    held: dict[tuple[str, str], list[Row]] = {}
    for one in facts["transfers"]:
        row = Row(
            f"{one['prefill']} to {one['decode']}", _tokens(one["tokens"]), one["nbytes"], one["descriptors"],
            one["descriptor_nbytes"], _span(one["direct_seconds"]), _span(one["packed_seconds"]),
            one["packed_messages"],
        )  # fmt: skip
        held.setdefault((one["model"], one["engine"]), []).append(row)
    for (model, engine), rows in held.items():
        yield model, engine, rows


def _tokens(count: int) -> str:
    """Show a number of tokens as it is given.

    >>> _tokens(32768), _tokens(1000)
    ('32k', '1,000')
    """
    return f"{count:,}" if count % 1024 else f"{count // 1024}k"


def _span(seconds: Sequence[float]) -> str:
    """Show the least and the most seconds in one unit; one of them if they look alike.

    >>> _span([0.0701, 0.398]), _span([0.05391, 0.05392]), _span([0.0009, 2.0])
    ('70.1-398 ms', '53.9 ms', '0.0009-2 s')
    """
    low, high = duration(min(seconds)), duration(max(seconds))
    if low == high:
        return low
    number, unit = high.split()
    least = f"{min(seconds) / max(seconds) * float(number):.3g}"
    return high if least == number else f"{least}-{number} {unit}"
