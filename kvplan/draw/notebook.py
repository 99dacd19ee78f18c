"""Show layouts, programs, plans and reshardings in a notebook as HTML: the facts, and a picture if there is one.

The functions take the objects themselves, and read only their public attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import islice
from typing import Any

from kvplan.base.numbers import between, count_of, exact, nbytes_text, number_ranges, percent
from kvplan.draw.block import block_picture
from kvplan.draw.svg import svg
from kvplan.errors import LayoutError
from kvplan.layout.components import ADDRESSES, Built, Component
from kvplan.layout.padding import padding_of
from kvplan.layout.strides import extent

SHOWN = 16  # pairs of ranks in a table


def facts_html(facts: Mapping[str, str], picture: str = "") -> str:
    """Return facts as a table, with a picture below; without scripts or links.

    >>> facts_html({"runs": "1 < 2"})
    '<div class="kvplan"><table><tr><th>runs</th><td>1 &lt; 2</td></tr></table></div>'
    """
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f'<div class="kvplan"><table>{rows}</table>{picture}</div>'


def layout_html(layout: Built, layers: Sequence[int], heads: Sequence[int], addresses: str) -> str:
    """Return a layout as HTML, with the picture of block 0; layers that differ have a line for each kind.

    Args:
        layout: plain data of the layout.
        layers, heads: global numbers of its layers and heads.
        addresses: the value of :attr:`kvplan.KVLayout.addresses`.

    >>> from kvplan import KVLayout
    >>> layout = KVLayout.from_spec({"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}})
    >>> "<th>a block</th><td>2,048 bytes</td>" in layout._repr_html_()
    True
    """
    try:
        picture = svg(block_picture(layout))
    except LayoutError:  # too many runs to draw: show the facts without a picture
        picture = ""
    padding, opaque = padding_of(layout), [c.part for c in layout.components if c.form.opaque]
    whole = "sub-block" if layout.opaque and layout.block_tokens > 1 else "block"
    token_nbytes = sum(extent(c.form.head) * extent(c.form.dim) for c in layout.components if not c.form.opaque)
    without = f", without {', '.join(dict.fromkeys(opaque))}, which moves whole" * bool(opaque)
    kinds = dict(_kinds(layout))
    return facts_html({
        "layout": layout.notation,
        "content": f"{layout.dtype} on {layout.device}{ADDRESSES[addresses]}",
        "layers": _numbers(layers),
        **(kinds if len(kinds) > 1 else {}),
        "parts": ", ".join(layout.parts),
        "heads": _numbers(heads) if any(c.form.headed for c in layout.components) else "no axis of heads",
        "blocks": f"{layout.num_blocks:,} of {count_of(layout.block_tokens, 'token' if whole == 'block' else whole)}",
        "a token": nbytes_text(token_nbytes) + without if token_nbytes else f"no token slots; {whole}s move whole",
        "a block": nbytes_text(layout.block_nbytes),
        "all blocks": nbytes_text(layout.num_blocks * layout.block_nbytes),
        "padding": f"{nbytes_text(padding.nbytes)}, {percent(padding.share)}" if padding.nbytes else "none",
    }, picture)  # fmt: skip


def _numbers(numbers: Sequence[int]) -> str:
    return f"{len(numbers):,} ({number_ranges(numbers, ', ')})"


def _kinds(layout: Built) -> Iterator[tuple[str, str]]:
    """Yield the layers of each kind, and what each of them holds."""
    layers: dict[int, dict[str, list[Component]]] = {}
    for component in layout.components:
        layers.setdefault(component.layer, {}).setdefault(component.part, []).append(component)
    kinds: dict[str, list[int]] = {}
    for layer, parts in layers.items():
        kinds.setdefault("; ".join(_content(part, some) for part, some in parts.items()), []).append(layer)
    yield from ((f"layers {number_ranges(numbers, ', ')}", content) for content, numbers in kinds.items())


def _content(part: str, components: Sequence[Component]) -> str:
    form, rows = components[0].form, sum(extent(c.form.head) for c in components)
    where = f"{count_of(rows, 'head')} of " if form.headed else ""
    return f"{part}: {where}{nbytes_text(extent(form.dim))}{' a token' * (not form.opaque)}"


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
    facts = {"direction": plan.direction, "moves": f"{count_of(plan.units, 'unit')}, {exact(plan.nbytes)}"}
    for k, (src, dst) in enumerate(plan.layouts):
        number = f" {k}" if len(plan.layouts) > 1 else ""
        facts |= {f"from{number}": str(src), f"to{number}": str(dst)}
    runs = sum(part.copies for part in plan.moving)
    return facts_html({**facts, "runs": f"{runs:,}, before those that touch are merged"})


def resharding_html(resharding: Any) -> str:
    """Return a :class:`kvplan.Resharding` as HTML, with its diagram."""
    sides = count_of(len(resharding.sources), "source"), count_of(len(resharding.destinations), "destination")
    unit = f"skips count units of {count_of(resharding.unit_tokens, 'token')}"
    facts = {"ranks": " to ".join(sides), "unit": unit}
    for (source, destination), pair in islice(resharding.items(), SHOWN):
        least, most = zip(*(program.run_nbytes for program in pair.programs), strict=True)
        runs = count_of(sum(program.runs for program in pair.programs), "run")
        moved = f"{'; '.join(pair.told())}: {runs} of {between(min(least), max(most))} bytes a unit"
        facts[f"{source} to {destination}"] = moved
    if len(resharding) > SHOWN:
        facts["..."] = f"{count_of(len(resharding) - SHOWN, 'more pair')}"
    return facts_html(facts, resharding.diagram())
