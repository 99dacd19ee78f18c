"""The picture of a resharding: blocks of source ranks above, blocks of destination ranks below, copies between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvplan.base.numbers import count_of, rounded
from kvplan.draw.bands import NEAR, OTHERS, PATTERNS, Band, Label, Line, Picture, Ribbon, Row, spaced
from kvplan.draw.svg import svg

GAP = 110  # pixels that ribbons cross
MOST, MANY = 600, 100  # copies that are drawn, evenly chosen; bands without spaces between them
WHOLE = 1 << 20  # the length of each rank
# Colours of eight ranks; Paul Tol's muted olive and wine beside Okabe and Ito's.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999933", "#882255")


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

    A small space stands for bytes of a rank that no copy touches. All ranks of a side have the same length. Below each
    rank's name are the bytes and the runs that it sends or receives.
    """
    copies = picture.copies[:: max(-(-len(picture.copies) // MOST), 1)]
    note = f"; {len(copies)} of {len(picture.copies)} copies drawn" * (len(copies) < len(picture.copies))
    counts = " to ".join(count_of(len(names), "rank") for names in picture.names)
    (above, upper), (below, lower) = (_side(picture, copies, side) for side in (0, 1))
    ribbons = []
    for copy in copies:
        band = lower[copy.destination, copy.dst, copy.nbytes]
        ribbons.append(Ribbon(upper[copy.source, copy.src, copy.nbytes], band, band, _rank(copy)))
    fills = {f"rank {k}": (PALETTE[k % 8], k // 8 % PATTERNS) for k in range(len(picture.names[0]))}
    heading = (f"{counts}: {picture.content}{note}", picture.blocks)
    rows = (replace(above, above=True, ribbons=tuple(ribbons)), below)
    return svg(Picture(picture.title, "", heading, fills, (), rows, GAP))


def _rank(copy: RankCopy) -> str:
    return f"rank {copy.source}"


def _side(picture: RankPicture, copies: Sequence[RankCopy], side: int) -> tuple[Row, dict[tuple[int, int, int], int]]:
    """Return the row of one side, and the index of the band at each (rank, address, bytes)."""
    items: list[tuple[object, Band, bool]] = []
    keys: list[tuple[int, int, int]] = []
    for k in range(len(picture.names[side])):
        mine = sorted({(copy[2 + side], copy.nbytes, _rank(copy)) for copy in copies if copy[side] == k})
        total = sum(nbytes for _, nbytes, _ in mine)
        for start, nbytes, fill in mine:
            touching = bool(keys) and keys[-1][0] == k and sum(keys[-1][1:]) >= start
            length = max(WHOLE * nbytes // total, 1)
            items.append((k, Band("", length, fill, length), touching))
            keys.append((k, start, nbytes))
        if not mine:
            items.append((k, Band("", WHOLE, OTHERS), False))
            keys.append((k, 0, 0))
    index, row = spaced(items, near=NEAR * (len(items) < MANY))
    lines: list[list[Label]] = [[] for _ in range(4)]
    for k, (name, frame) in enumerate(zip(picture.names[side], row.frames, strict=True)):
        moved = [copy.nbytes for copy in picture.copies if copy[side] == k]
        for line, text in zip(lines, (*name, rounded(sum(moved)), count_of(len(moved), "run")), strict=True):
            line.append(Label(*frame, text))
    forms = (tuple(Line(tuple(line)) for line in lines),)
    return replace(row, forms=forms, frames=()), dict(zip(keys, index, strict=True))
