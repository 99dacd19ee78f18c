"""A wire's profile, and the lists that were timed for it, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplan.base.numbers import binary, duration, rate
from kvplan.cli.screen.printing import fact_table, number_table
from kvplan.cost.wires.wire_profile import WireProfile

if TYPE_CHECKING:
    from kvplan.measure.wires.wire_posts import Posted

HEADER = ("", "descriptors", "each", "post", "all", "GB/s")


def wire_screen(wire: WireProfile, posts: Sequence[Posted]) -> list[Any]:
    """Return a wire's profile as a table, and the lists as another.

    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> len(wire_screen(default_wire(), []))
    2
    """
    by = "moves while more is posted" if wire.overlaps else "the CPU that posts moves the bytes"
    facts = [
        ("wire", f"{wire.wire or 'any wire'}, {'GPU' if wire.memory == 'VRAM' else 'host'} memory"),
        ("made", f"{wire.how}: {wire.made}"),
        ("one message", f"{rate(1e-9 / max(wire.byte, 1e-15))}; {by}"),
        ("descriptor", f"{duration(wire.descriptor)} of the CPU, {duration(wire.message)} of the wire"),
        ("list", f"{duration(wire.post)} of the CPU, seen by the other process after {duration(wire.latency)}"),
        *((side, f"{duration(one.fixed)} a slot, {duration(one.run)} a run, {1e-9 / max(one.byte, 1e-15):,.1f} GB/s")
          for side, one in (("gather", wire.gather), ("scatter", wire.scatter))),
        ("protocol", f"{duration(wire.chunk)} a slot, {duration(wire.start)} until the first one is on its way"),
        ("slots", f"{wire.slots} of {binary(wire.slot_nbytes)} for each pair of processes"),
    ]  # fmt: skip
    if wire.note:
        facts.append(("note", wire.note))
    rows = [(one.operation, f"{one.descriptors:,}", binary(one.nbytes), duration(one.post), duration(one.seconds),
             f"{one.descriptors * one.nbytes / one.seconds * 1e-9:.2f}") for one in posts]  # fmt: skip
    return [fact_table(facts), number_table(HEADER, rows, right=range(1, 6))]
