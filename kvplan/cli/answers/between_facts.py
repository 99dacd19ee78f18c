"""Facts of blocks that cross a wire: their descriptors, what packing saves, and the way that they take."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvplan.base.numbers import binary, count_of, duration, exact
from kvplan.layout.kvlayout import KVLayout

if TYPE_CHECKING:
    from kvplan.cost.wires.crossing import Crossing
    from kvplan.program.program import Program

ENOUGH_NBYTES = 1 << 30  # bytes of the blocks that are asked about, if no blocks were given
HELP = ("also tell what the bytes take between machines: a published wire (rdma, rdma-rows, cuda-ipc, push), default, "
        "host, or a file")  # fmt: skip


def add_wire(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a wire; :func:`between_facts` reads its profile."""
    parser.add_argument("--wire", metavar="PROFILE", help=HELP)


def layout_crossing(layout: KVLayout) -> tuple[Crossing, int]:
    """Return the counts of about 1 GiB of a layout's blocks that move to an equal layout, and their number."""
    from kvplan.plan.copy_program import compile  # noqa: A004

    return program_crossing(compile(layout, layout).program)


def program_crossing(program: Program) -> tuple[Crossing, int]:
    """Return the counts of about 1 GiB of a program's units, of which no two touch, and the number of units."""
    from kvplan.cost.wires.crossing import Crossing, unit_crossing

    one = unit_crossing(program)
    units = max(ENOUGH_NBYTES // one.nbytes, 1)
    return Crossing(*(units * count for count in one[:-1])), units


def between_facts(crossing: Crossing, units: int, name: str) -> dict[str, Any]:
    """Return the cost of a transfer on a wire, direct and packed, as facts.

    Args:
        crossing: counts of the transfer.
        units: units or blocks that move.
        name: name of the wire's profile, or its file.

    Raises:
        KVPlanError: there is no such profile.

    >>> from kvplan.cost.wires.crossing import Crossing
    >>> found = between_facts(Crossing(1 << 30, 1024, 131072, 131072, 1024), 1024, "push")
    >>> found["way"], found["descriptors"], found["messages"]
    ('packed', 131072, 64)
    """
    from kvplan.cost.wires.wire_model import best_slot, choose_way
    from kvplan.cost.wires.wire_store import wire_by_name

    wire = wire_by_name(name)
    size = wire.slot_nbytes if wire.how == "calibrated" else best_slot(crossing, wire)
    made = choose_way(crossing, wire, slot_nbytes=size)
    return {
        "wire": wire.kind,
        "how": wire.how,
        "made": wire.made,
        "units": units,
        "nbytes": crossing.nbytes,
        "descriptors": crossing.descriptors,
        "descriptor_nbytes": crossing.descriptor_nbytes,
        "gather_runs": crossing.gather_runs,
        "scatter_runs": crossing.scatter_runs,
        "messages": made.packed.messages,
        "slot_nbytes": size,
        "direct_seconds": made.direct.seconds,
        "packed_seconds": made.packed.seconds,
        "way": made.way,
        "why": made.why,
    }


def between_rows(facts: Mapping[str, Any], of: str = "unit") -> list[tuple[str, str]]:
    """Return the facts of :func:`between_facts` as rows of words.

    Args:
        facts: facts of a transfer.
        of: name of a unit: ``"unit"`` or ``"block"``.

    >>> from kvplan.cost.wires.crossing import Crossing
    >>> for row in between_rows(between_facts(Crossing(1 << 30, 1024, 131072, 131072, 1024), 1024, "push"), "block"):
    ...     print(": ".join(row))
    wire: NIC of 400 Gb/s, push, GPU memory; published: vLLM #35264: 118 descriptors take 0.46 ms to post, 18,880 take 46 ms
    bytes: 1,073,741,824 bytes (1 GiB) in 1,024 blocks
    direct: 318 ms, 131,072 descriptors of 8 KiB, 128 a block
    packed: 23.5 ms, 64 writes of up to 16 MiB; gather copies 131,072 runs, scatter 1,024
    way: packed takes 23.5 ms in 64 messages; direct takes 318 ms, of which 100 % post 131,072 descriptors of 8 KiB
    """  # noqa: E501
    each = facts["descriptors"] / max(facts["units"], 1)
    pieces = f"{count_of(facts['descriptors'], 'descriptor')} of {binary(facts['descriptor_nbytes'])}"
    writes = f"{count_of(facts['messages'], 'write')} of up to {binary(facts['slot_nbytes'])}"
    copies = f"gather copies {count_of(facts['gather_runs'], 'run')}, scatter {facts['scatter_runs']:,}"
    return [
        ("wire", f"{facts['wire']}; {facts['how']}: {facts['made']}"),
        ("bytes", f"{exact(facts['nbytes'])} in {count_of(facts['units'], of)}"),
        ("direct", f"{duration(facts['direct_seconds'])}, {pieces}, {each:,.4g} a {of}"),
        ("packed", f"{duration(facts['packed_seconds'])}, {writes}; {copies}"),
        ("way", facts["why"]),
    ]
