"""Parse the notation of layouts: einops for KV caches.

    "layer: block kv token head dim"

Left of the colon is the nesting of tensors in Python sequences, outermost first. Right of the colon are the dims of
each tensor, in the order of its shape. ``(a b)`` is one dim that holds two axes, outer first. ``a.0 ... a.1`` is one
axis that two dims hold; 0 is the outer dim. ``1`` is a dim of extent 1. ``subblock`` replaces ``token`` if the bytes of
a token are not contiguous: a sub-block is opaque and moves whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvplan.base.values import quoted
from kvplan.errors import NotationError

AXES = ("layer", "kv", "block", "token", "subblock", "head", "dim")
NESTING_AXES = ("layer", "kv", "block", "head")
PARTS, JOINED = "|", " + "  # between parts that share a page, and between layouts that were merged

_FACTOR = re.compile(r"0|[1-9]\d?", re.ASCII)
_TOKEN = re.compile(r"([A-Za-z_]\w*(?:\.\w*)?|\d+|[():])|(\S)")
_HINTS = {
    "|": " (only kvplan.allocate makes a page of several parts)",
    "+": " (it stands between the notations of a merged layout: give each to a layout of its own, and merge them)",
}


class Atom(NamedTuple):
    """One axis inside one dim: the whole axis (``factor is None``), or factor ``factor`` of it; 0 is the outermost.

    >>> str(Atom("dim", 1))
    'dim.1'
    """

    axis: str
    factor: int | None = None

    def __str__(self) -> str:
        return self.axis if self.factor is None else f"{self.axis}.{self.factor}"


Dim = tuple[Atom, ...]  # the axes of one dim, outer first; () is a dim of extent 1


@dataclass(frozen=True, slots=True)
class Notation:
    """A parsed notation.

    Attributes:
        nesting: the axes left of the colon, outermost first; empty if there is one tensor.
        dims: the dims of each tensor, in the order of its shape.

    >>> parse("kv layer: (block token) 1 dim").nesting
    ('kv', 'layer')
    >>> str(parse("kv  layer:(block token) 1 dim"))
    'kv layer: (block token) 1 dim'
    """

    nesting: tuple[str, ...]
    dims: tuple[Dim, ...]

    def __str__(self) -> str:
        right = " ".join(_print_dim(dim) for dim in self.dims)
        return f"{' '.join(self.nesting)}: {right}" if self.nesting else right

    @property
    def axes(self) -> frozenset[str]:
        """All axes of the notation, on both sides of the colon."""
        return frozenset(self.nesting) | {atom.axis for dim in self.dims for atom in dim}

    def factors(self, axis: str) -> tuple[Atom, ...]:
        """Return the atoms of an axis right of the colon, outermost factor first.

        >>> [str(a) for a in parse("block head token.1 dim token.0").factors("token")]
        ['token.0', 'token.1']
        """
        atoms = [atom for dim in self.dims for atom in dim if atom.axis == axis]
        return tuple(sorted(atoms, key=lambda atom: atom.factor or 0))


def _print_dim(dim: Dim) -> str:
    if not dim:
        return "1"
    if len(dim) == 1:
        return str(dim[0])
    return f"({' '.join(map(str, dim))})"


def parse(text: str) -> Notation:
    """Parse a notation.

    Args:
        text: text such as ``"layer: kv block head.0 token head.1 dim"``.

    Raises:
        NotationError: the text is not a notation; the error has the column of the first mistake.

    >>> parse("block: layer kv token head dim")
    Notation(nesting=('block',), dims=((Atom(axis='layer', factor=None),), (Atom(axis='kv', factor=None),), \
(Atom(axis='token', factor=None),), (Atom(axis='head', factor=None),), (Atom(axis='dim', factor=None),)))
    """
    if not isinstance(text, str):
        raise NotationError(f"a notation is a str, not {type(text).__name__}", text=quoted(text), column=1)
    return _parsed(text)


def notations(text: str) -> tuple[Notation, ...]:
    """Return the notations in the text of a layout: a merged layout has several, and so has a page of several parts.

    >>> [str(each) for each in notations("block | k: head dim | scale: head + block dim")]
    ['block head dim', 'block head', 'block dim']
    """
    every: list[Notation] = []
    for each in text.split(JOINED):
        first, *sections = each.split(PARTS)
        every += [parse(f"{first} {section.partition(':')[2]}") for section in sections] or [parse(first)]
    return tuple(every)


@lru_cache(maxsize=256)
def _parsed(text: str) -> Notation:
    return _Parser(text).notation()


class _Parser:
    """Parse one text; every error has the column of its piece."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.seen: dict[Atom, int] = {}  # with their columns

    def wrong(self, column: int, problem: str) -> NotationError:
        return NotationError(problem, text=self.text, column=column)

    def notation(self) -> Notation:
        pieces = self.pieces()
        colons = [at for at, (piece, _) in enumerate(pieces) if piece == ":"]
        if len(colons) > 1:
            raise self.wrong(pieces[colons[1]][1], "a second ':'")
        split = colons[0] if colons else -1
        if split == 0:
            raise self.wrong(pieces[0][1], "nothing left of the ':'; drop it for one tensor")
        nesting = tuple(self.nesting(*piece) for piece in pieces[: max(split, 0)])
        dims = self.dims(pieces[split + 1 :])
        if not dims:
            raise self.wrong(len(self.text) + 1, "no dims; a tensor has at least one")
        self.check()
        return Notation(nesting, dims)

    def pieces(self) -> list[tuple[str, int]]:
        """Cut the text into names, numbers and marks, each with its column."""
        pieces = []
        for match in _TOKEN.finditer(self.text):
            if match[2]:
                raise self.wrong(match.start() + 1, f"unexpected character {match[2]!r}{_HINTS.get(match[2], '')}")
            pieces.append((match[1], match.start() + 1))
        return pieces

    def atom(self, piece: str, column: int) -> Atom:
        axis, dot, digits = piece.partition(".")
        if axis not in AXES:
            raise self.wrong(column, f"unknown axis {quoted(piece)} (axes are {', '.join(AXES)})")
        if dot and not _FACTOR.fullmatch(digits):
            raise self.wrong(column, f"{quoted(piece)}: write the number of the factor after the dot, as in {axis}.0")
        if dot and axis == "kv":
            raise self.wrong(column, "kv has extent 2 and cannot be split")
        atom = Atom(axis, int(digits) if dot else None)
        if atom in self.seen:
            raise self.wrong(column, f"{atom} is named twice")
        if any(other.axis == axis and (other.factor is None) == bool(dot) for other in self.seen):
            raise self.wrong(column, f"{axis} is named both whole and split")
        self.seen[atom] = column
        return atom

    def nesting(self, piece: str, column: int) -> str:
        if piece not in NESTING_AXES:
            allowed = ", ".join(NESTING_AXES)
            raise self.wrong(column, f"{quoted(piece)} cannot stand left of the ':' (only {allowed} can)")
        return self.atom(piece, column).axis

    def dims(self, pieces: list[tuple[str, int]]) -> tuple[Dim, ...]:
        dims: list[Dim] = []
        group: list[Atom] | None = None  # the open parenthesis, if any
        opened = 0
        for piece, column in pieces:
            if piece == "(":
                if group is not None:
                    raise self.wrong(column, "a '(' inside a '('")
                group, opened = [], column
            elif piece == ")":
                if group is None:
                    raise self.wrong(column, "a ')' without its '('")
                if not group:
                    raise self.wrong(opened, "an empty '()'; a dim of extent 1 is written 1")
                dims.append(tuple(group))
                group = None
            elif group is not None and not piece[0].isdigit():
                group.append(self.atom(piece, column))
            elif piece == "1" and group is None:
                dims.append(())
            elif piece[0].isdigit():
                only = "the only number is 1, a dim of its own; extents come from shapes or sizes"
                raise self.wrong(column, f"{quoted(piece)}: {only}")
            else:
                dims.append((self.atom(piece, column),))
        if group is not None:
            raise self.wrong(opened, "a '(' that is never closed")
        return tuple(dims)

    def check(self) -> None:
        """Check that factors are numbered 0, 1, ... without a gap, and that a block holds tokens or sub-blocks."""
        first: dict[str, int] = {}
        for (axis, factor), column in self.seen.items():
            first.setdefault(axis, column)
            numbers = {other.factor for other in self.seen if other.axis == axis}
            missing = set(range(max(2, len(numbers)))) - numbers
            if factor is not None and missing:
                raise self.wrong(column, f"{axis} is split but {axis}.{min(missing)} is missing")
        if "token" in first and "subblock" in first:
            column = max(first["token"], first["subblock"])
            raise self.wrong(column, "token and subblock exclude each other: a sub-block is opaque")
