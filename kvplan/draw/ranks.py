"""A picture of a resharding: blocks of the source ranks above, of the destination ranks below, and what goes where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.base.numbers import number_ranges
from kvplan.draw.diagram import COLOURS, STYLE
from kvplan.layout.address_ranges import merged
from kvplan.layout.kvlayout import KVLayout

if TYPE_CHECKING:
    from kvplan.ranks.resharding import Resharding
    from kvplan.ranks.shards import Shard

WIDTH, MARGIN = 960, 24
BAND, GAP, CAPTION = 30, 110, 18  # heights: a rank's bytes, the space that runs cross, a line of text
BETWEEN = 14  # pixels between ranks
MAX_DRAWN = 600  # runs, evenly chosen where there are more
MAX_BLOCKS = 8  # of one rank
PALETTE = (*COLOURS, "#999933", "#882255")  # eight ranks; Paul Tol's muted olive and wine beside Okabe and Ito's


class _Run(NamedTuple):
    """A copy between two ranks, by their places in the picture."""

    source: int
    destination: int
    src: int
    dst: int
    nbytes: int


def ranks(resharding: Resharding) -> str:
    """SVG of one layer and part: some blocks of every rank, in order of their addresses, and the copies between them.

    Bytes of a rank that nothing moves are left out, and what lies apart has a small space between; all ranks of a side
    are drawn in one width.
    """
    layer, names, sides, runs, told = _one_part(resharding)
    shown = runs[:: -(-len(runs) // MAX_DRAWN)] if runs else []
    upper = MARGIN + 4 * CAPTION
    lower = upper + BAND + GAP
    height = lower + BAND + 2 * CAPTION + MARGIN
    counts = [f"{len(side)} rank{'s' * (len(side) != 1)}" for side in sides]
    note = "" if len(shown) == len(runs) else f"; {len(shown)} of {len(runs)} copies drawn"
    page = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(repr(resharding), quote=False)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        _text(MARGIN, MARGIN + 8, f"{counts[0]} to {counts[1]}: layer {layer}, {' '.join(names)}{note}"),
        _text(MARGIN, MARGIN + 8 + CAPTION, told, small=True),
    ]
    rows = [
        _Row([_touched(runs, side, k) for k in range(len(sides[side]))], at)
        for side, at in ((0, upper), (1, lower))
    ]  # fmt: skip
    for side, row in enumerate(rows):
        for k, shard in enumerate(sides[side]):
            page += row.bands(k)
            colour = PALETTE[k % len(PALETTE)] if side == 0 else None
            page += _label(
                row.left(k), upper - 8 if side == 0 else lower + BAND + 16, _rank_name(k, shard, layer), colour
            )
    for run in shown:
        colour = PALETTE[run.source % len(PALETTE)]
        a, b = rows[0].place(run.source, run.src, run.nbytes), rows[1].place(run.destination, run.dst, run.nbytes)
        for (start, width), at in ((a, upper), (b, lower)):
            page.append(
                f'<rect x="{start:.1f}" y="{at}" width="{max(width, 0.6):.1f}" height="{BAND}" fill="{colour}"/>'
            )
        corners = ((a[0], upper + BAND), (a[0] + a[1], upper + BAND), (b[0] + b[1], lower), (b[0], lower))
        points = " ".join(f"{x:.1f},{y}" for x, y in corners)
        page.append(f'<polygon points="{points}" fill="{colour}" fill-opacity="0.22"/>')
    return "\n".join([*page, "</svg>\n"])


def _block_counts(src: Shard, dst: Shard, spans: tuple[int, int], turns: int) -> tuple[int, int]:
    """Blocks of two ranks to draw: as many as hold the same tokens, and one of the destination for each turn."""
    tokens = lcm(*spans)
    tokens *= -(-turns * spans[1] // tokens)
    most = [min(shard.layout.num_blocks, MAX_BLOCKS) * span for shard, span in zip((src, dst), spans, strict=True)]
    large = max(spans)
    if min(most) < large:  # of one large block, as much as the small ones hold
        return (1, most[1] // spans[1]) if spans[0] == large else (most[0] // spans[0], 1)
    tokens = min(tokens, min(most) // large * large)
    return tokens // spans[0], tokens // spans[1]


def _one_part(
    resharding: Resharding,
) -> tuple[int, tuple[str, ...], tuple[Sequence[Shard], Sequence[Shard]], list[_Run], str]:
    """The first layer and part that anything moves, the ranks, the copies between them, and of which blocks."""
    from kvplan.ranks.resharding import reshard

    sides = resharding.sources, resharding.destinations
    first = min(
        (share for program in resharding.values() for share in program.shares), key=lambda share: share.layers[0],
        default=None,
    )  # fmt: skip
    if first is None:
        return 0, (), sides, [], "nothing is moved"
    layer = first.layers[0]
    alike = first.src_parts[0] == first.dst_parts[0]
    names = first.dst_parts[:1] if alike else first.dst_parts
    src_names = names if alike else first.src_parts
    held = [
        [_slice(shard, layer, parts) for shard in side] for side, parts in zip(sides, (src_names, names), strict=True)
    ]
    places = [[k for k, shard in enumerate(side) if shard is not None] for side in held]
    small = reshard(*[[shard for shard in side if shard is not None] for side in held], complete=False)
    turns = max(share.turn.ranks for program in small.values() for share in program.shares)
    runs, counts = [], set()
    for (s, d), program in small.items():
        blocks = _block_counts(program.src, program.dst, program.spans, turns)
        counts.add(blocks)
        made = program.plan(range(blocks[0]), range(blocks[1])).descriptors()
        rows = zip(made.src.tolist(), made.dst.tolist(), made.size.tolist(), strict=True)
        runs += [_Run(places[0][s], places[1][d], *row) for row in rows]
    above, below = (f"{n} block{'s' * (n != 1)}" for n in max(counts))
    told = f"above {above} of each source, below {below} of each destination"
    return layer, names, sides, sorted(runs, key=lambda run: (run.destination, run.dst)), told


def _slice(shard: Shard, layer: int, parts: tuple[str, ...]) -> Shard | None:
    """One layer and some parts of a rank, at made-up addresses: what is drawn is not moved, and may overlap."""
    layout: KVLayout = shard.layout
    if layer not in layout.layers or not set(parts) <= set(layout.parts):
        return None
    held = layout.slice(layers=(layer,), parts=parts)
    regions = tuple(replace(region, virtual=True) for region in held.regions)
    return replace(shard, layout=KVLayout(held.built._replace(regions=regions)))


def _rank_name(k: int, shard: Shard, layer: int) -> list[str]:
    if layer not in shard.layout.layers:
        return [f"rank {k}", f"layers {number_ranges(shard.layout.layers)}"]
    held = shard.layout.heads
    heads = f"head{'s' * (len(held) > 1)} {number_ranges(held)}"
    if not any(c.form.headed for c in shard.layout.components):
        heads = "no heads"
    return [f"rank {k}", heads if shard.cp_size == 1 else f"{heads}, tokens {shard.cp_rank} of {shard.cp_size}"]


def _touched(runs: Sequence[_Run], side: int, rank: int) -> list[tuple[int, int]]:
    """First byte and end of every stretch of one rank that is moved, in order."""
    return merged((run[2 + side], run[2 + side] + run.nbytes) for run in runs if run[side] == rank)


class _Row:
    """The ranks of one side, beside one another."""

    def __init__(self, stretches: Sequence[Sequence[tuple[int, int]]], top: int) -> None:
        self._stretches, self._top = stretches, top
        self._each = (WIDTH - 2 * MARGIN - BETWEEN * (len(stretches) - 1)) / len(stretches)

    def left(self, rank: int) -> float:
        """Left edge of a rank."""
        return MARGIN + rank * (self._each + BETWEEN)

    def _scale(self, rank: int) -> tuple[float, float]:
        """Pixels a byte, and pixels between stretches that lie apart."""
        held = self._stretches[rank]
        spaces = len(held) - 1
        space = min(4.0, self._each / 4 / spaces) if spaces > 0 else 0.0
        return (self._each - space * max(spaces, 0)) / max(sum(end - start for start, end in held), 1), space

    def _edges(self, rank: int) -> list[float]:
        scale, space = self._scale(rank)
        widths = np.array([(end - start) * scale + space for start, end in self._stretches[rank]])
        return [self.left(rank) + at for at in np.concatenate(([0.0], np.cumsum(widths)))[:-1].tolist()]

    def place(self, rank: int, start: int, nbytes: int) -> tuple[float, float]:
        """Left edge and width of one run."""
        scale, _ = self._scale(rank)
        k = next(k for k, (first, end) in enumerate(self._stretches[rank]) if first <= start < end)
        return self._edges(rank)[k] + (start - self._stretches[rank][k][0]) * scale, nbytes * scale

    def bands(self, rank: int) -> Iterator[str]:
        """The rank's bytes; a frame where nothing of it is moved."""
        scale, _ = self._scale(rank)
        boxes = list(
            zip(self._edges(rank), ((end - start) * scale for start, end in self._stretches[rank]), strict=True)
        )
        for left, width in boxes or [(self.left(rank), self._each)]:
            yield f'<rect class="band" x="{left:.1f}" y="{self._top}" width="{width:.1f}" height="{BAND}"/>'


def _label(x: float, y: float, lines: Sequence[str], colour: str | None) -> Iterator[str]:
    """Two lines: above a source's bytes they end at ``y``, below a destination's they begin there."""
    first = y - CAPTION if colour else y
    if colour:
        yield f'<rect x="{x:.1f}" y="{first - 9}" width="9" height="9" fill="{colour}"/>'
    yield _text(x + (14 if colour else 0), first, lines[0])
    yield _text(x, first + CAPTION - 2, lines[1], small=True)


def _text(x: float, y: float, text: str, *, small: bool = False) -> str:
    kind = ' class="small"' if small else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(text, quote=False)}</text>'
