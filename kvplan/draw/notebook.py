"""Show programs, plans and reshardings in a notebook as HTML: the facts, and a picture if there is one.

The functions take the objects themselves, and read only their public attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from kvplan.base.numbers import between, count_of, exact

SHOWN = 16  # pairs of ranks in a table


def facts_html(facts: Mapping[str, str], picture: str = "") -> str:
    """Return facts as a table, with a picture below; without scripts or links.

    >>> facts_html({"runs": "1 < 2"})
    '<div class="kvplan"><table><tr><th>runs</th><td>1 &lt; 2</td></tr></table></div>'
    """
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f'<div class="kvplan"><table>{rows}</table>{picture}</div>'


def program_html(program: Any) -> str:
    """Return a :class:`kvplan.CopyProgram` as HTML, with its diagram."""
    count, least, most = program.program.extents("dst")
    return facts_html({
        "from": str(program.src),
        "to": str(program.dst),
        "direction": program.direction,
        "unit": f"{program.program.unit_words}, {exact(program.unit_nbytes)}",
        "runs": f"{count_of(program.runs, 'run')} of {between(*program.run_nbytes)} bytes a unit",
        "extents": f"{count_of(count, 'extent')} of {between(least, most)} bytes in the destination",
        "alignment": exact(program.alignment),
    }, program.diagram())  # fmt: skip


def plan_html(plan: Any) -> str:
    """Return a :class:`kvplan.Plan` as HTML."""
    runs = sum(part.copies for part in plan.moving)
    facts = {"direction": plan.direction, "moves": f"{count_of(plan.units, 'unit')}, {exact(plan.nbytes)}"}
    for k, (src, dst) in enumerate(plan.layouts):
        number = f" {k}" if len(plan.layouts) > 1 else ""
        facts |= {f"from{number}": str(src), f"to{number}": str(dst)}
    return facts_html({**facts, "runs": f"{runs:,}, before those that touch are merged"})


def resharding_html(resharding: Any) -> str:
    """Return a :class:`kvplan.Resharding` as HTML, with its diagram."""
    facts = {
        "ranks": " to ".join((count_of(len(resharding.sources), "source"),
                              count_of(len(resharding.destinations), "destination"))),
        "unit": f"skips count units of {count_of(resharding.unit_tokens, 'token')}",
    }  # fmt: skip
    for k, ((source, destination), pair) in enumerate(resharding.items()):
        if k == SHOWN:
            facts["..."] = f"{count_of(len(resharding) - SHOWN, 'more pair')}"
            break
        runs = sum(program.runs for program in pair.programs)
        moved = f"{count_of(runs, 'run')} of {between(*_sizes(pair))} bytes a unit"
        facts[f"{source} to {destination}"] = f"{'; '.join(pair.told())}: {moved}"
    return facts_html(facts, resharding.diagram())


def _sizes(pair: Any) -> tuple[int, int]:
    sizes = [program.run_nbytes for program in pair.programs]
    return min(low for low, _ in sizes), max(high for _, high in sizes)
