"""Write docs/processes/wires.md: what requests of all models take between machines, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvplan.base.numbers import binary, decimal, duration
from kvplan.cli.answers.wire_facts import tables

HEAD = """# Transfers between machines, on paper

<!-- made by: kvplan wires --markdown > docs/processes/wires.md -->

The tables show what a prefill takes from the machines that computed it to the machines that decode it: {count:,}
transfers of {models} models. [Packed transfers](packed.md) explains the two ways.

kvplan's own plans give the numbers of bytes, descriptors and writes. The wire is a model: every rank has a NIC of
{gbps:.0f} GB/s (400 Gb/s), with a latency of {latency} and {rate:.0f} million messages a second. Gather and scatter
cost what they cost on an H200. Nothing in these tables was measured over a network.

A descriptor costs what others have published:

| wire | a descriptor | source |
| --- | ---: | --- |
{wires}
* *Bytes* and *descriptors* are those of the rank that receives the most, and *each* is the size of a descriptor.
* *Direct* is the time with a descriptor for each piece, from the cheapest descriptor to the dearest.
* *Packed* is the time with gather, few large writes, and scatter. *Writes* is their number at 128k tokens.
* Blocks of a request are scattered over the pool of each rank, as after hours of use. No two of them touch.
* A transfer takes as long as its slowest rank. The cache has bf16 elements, and states of fixed size are left out.
* DCP deals the tokens one by one to the ranks that hold the same heads.

`kvplan wires --model NAME` prints one model, `--wire FILE` takes a wire that was measured, and `--json` gives data.
"""
COLUMNS = ("ranks", "bytes", "descriptors", "each", "direct", "packed", "bytes", "descriptors", "direct", "packed",
           "writes")  # fmt: skip


def page(facts: Mapping[str, Any]) -> str:
    """Return the page as Markdown.

    Args:
        facts: facts of all models, from :func:`kvplan.cli.answers.wire_facts.wires_facts`, for two lengths.
    """
    first = facts["wires"][0]
    wires = "".join(f"| {one['wire'].rpartition(', ')[2]} | {duration(one['descriptor'])} | {one['made']} |\n"
                    for one in facts["wires"])  # fmt: skip
    models = {one["model"] for one in facts["transfers"]}
    head = HEAD.format(
        count=len(facts["transfers"]), models=len(models), gbps=1e-9 / first["byte"],
        latency=duration(first["latency"]), rate=1e-6 / first["message"], wires=wires,
    )  # fmt: skip
    return head + "".join(_sections(facts))


def _sections(facts: Mapping[str, Any]) -> Iterator[str]:
    shown = ""
    for model, engine, rows in tables(facts):
        if model != shown:
            yield f"\n## {model}\n"
            shown = model
        names = "Layouts of every engine" if engine == "any" else f"Layouts of {engine}"
        lengths = list(dict.fromkeys(row.tokens for row in rows))
        yield f"\n{names}, {' and '.join(lengths)} tokens:\n\n"
        cells = [[f"{name} {lengths[k > 5]}" if 0 < k < 10 and name != "each" else name
                  for k, name in enumerate(COLUMNS)], ["---", *["---:"] * (len(COLUMNS) - 1)]]  # fmt: skip
        for ranks in dict.fromkeys(row.ranks for row in rows):
            short, long = (row for row in rows if row.ranks == ranks)
            cells.append([ranks, decimal(short.nbytes), f"{short.descriptors:,}", binary(short.each), short.direct,
                          short.packed, decimal(long.nbytes), f"{long.descriptors:,}", long.direct, long.packed,
                          f"{long.messages:,}"])  # fmt: skip
        for row in cells:
            yield f"| {' | '.join(row)} |\n"
