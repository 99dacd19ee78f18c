"""Draw a resharding as SVG: blocks of source ranks above, blocks of destination ranks below, copies between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvplan.base.numbers import count_of, rounded
from kvplan.draw.ribbons import BAND, COLOURS, MARGIN, WIDTH, Line, document, ribbon, text_at

GAP, CAPTION = 110, 18  # heights in pixels: the space that ribbons cross, a line of text
BETWEEN = 14  # pixels between ranks
MAX_DRAWN = 600  # copies; if there are more, evenly chosen copies are drawn
PALETTE = (*COLOURS, "#999933", "#882255")  # eight ranks; Paul Tol's muted olive and wine beside Okabe and Ito's


class RankCopy(NamedTuple):
    """A copy between two ranks.

    Attributes:
        source, destination: numbers of the ranks, in the order of the picture.
        src, dst: source and destination address.
        nbytes: bytes of the copy.
    """

    source: int
    destination: int
    src: int
    dst: int
    nbytes: int


class RankPicture(NamedTuple):
    """The data of a picture of ranks.

    Attributes:
        title: title of the picture, for screen readers.
        content: the content that is copied, in words.
        blocks: the blocks that are shown, in words.
        names: for every source and every destination rank, two lines of text.
        copies: the copies between ranks, in order of destination.
    """

    title: str
    content: str
    blocks: str
    names: tuple[Sequence[tuple[str, str]], Sequence[tuple[str, str]]]
    copies: Sequence[RankCopy]


def ranks(picture: RankPicture) -> str:
    """Draw some blocks of every rank as SVG text, in order of address, and the copies between them.

    A small space stands for bytes of a rank that no copy touches. All ranks of a side have the same width. Each rank's
    name has the bytes and the runs that it sends or receives.
    """
    copies = picture.copies
    shown = copies[:: -(-len(copies) // MAX_DRAWN)] if copies else []
    note = "" if len(shown) == len(copies) else f"; {len(shown)} of {len(copies)} copies drawn"
    counts = [count_of(len(names), "rank") for names in picture.names]
    upper = MARGIN + 6 * CAPTION
    lower = upper + BAND + GAP
    page = [
        text_at(MARGIN, MARGIN + 8, f"{counts[0]} to {counts[1]}: {picture.content}{note}"),
        text_at(MARGIN, MARGIN + 8 + CAPTION, picture.blocks, kind="small"),
    ]
    lines = [_lines(copies, side, len(picture.names[side]), top) for side, top in ((0, upper), (1, lower))]
    for side, names in enumerate(picture.names):
        for k, (line, name) in enumerate(zip(lines[side], names, strict=True)):
            page += line.bands()
            held = _held(copies, side, k)
            if side == 0:
                page += _name(line.left, upper - 8 - 3 * CAPTION, (*name, *held), PALETTE[k % len(PALETTE)])
            else:
                page += _name(line.left, lower + BAND + 16, (*name, *held))
    for one in shown:
        ends = lines[0][one.source], lines[1][one.destination]
        page += ribbon(*ends, one.src, one.dst, one.nbytes, PALETTE[one.source % len(PALETTE)])
    return document(picture.title, lower + BAND + 4 * CAPTION + MARGIN, page)


def _lines(copies: Sequence[RankCopy], side: int, count: int, top: int) -> list[Line]:
    """Return a line for each rank of one side, with the bytes that copies touch."""
    held: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for one in copies:
        held[one[side]].append((one[2 + side], one[2 + side] + one.nbytes))
    width = (WIDTH - 2 * MARGIN - BETWEEN * (count - 1)) / count
    return [Line(ranges, MARGIN + k * (width + BETWEEN), top, width) for k, ranges in enumerate(held)]


def _held(copies: Sequence[RankCopy], side: int, rank: int) -> tuple[str, str]:
    """Return the bytes that a rank sends or receives in the picture, and the number of its runs.

    >>> _held([RankCopy(0, 1, 0, 0, 512), RankCopy(0, 0, 512, 0, 1536)], 0, 0)
    ('2 KiB', '2 runs')
    """
    moved = [one.nbytes for one in copies if one[side] == rank]
    return rounded(sum(moved)), count_of(len(moved), "run")


def _name(x: float, y: float, lines: Sequence[str], colour: str = "") -> Iterator[str]:
    """Draw lines of text, the first at ``y`` and after a sample of the rank's colour."""
    if colour:
        yield f'<rect x="{x:.1f}" y="{y - 9}" width="9" height="9" fill="{colour}"/>'
    yield text_at(x + (14 if colour else 0), y, lines[0])
    for k, line in enumerate(lines[1:], 1):
        yield text_at(x, y + k * (CAPTION - 2), line, kind="small")
