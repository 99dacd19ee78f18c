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

_FACTOR = re.compile(r"0|[1-9]\d?", re.ASCII)
_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*(?:\.\w*)?)|(?P<number>\d+)|(?P<mark>[():]))")


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


class _Piece(NamedTuple):
    text: str
    column: int


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


@lru_cache(maxsize=256)
def _parsed(text: str) -> Notation:
    pieces = _tokenize(text)
    colons = [k for k, piece in enumerate(pieces) if piece.text == ":"]
    if len(colons) > 1:
        raise NotationError("a second ':'", text=text, column=pieces[colons[1]].column)
    split = colons[0] if colons else -1
    if split == 0:
        raise NotationError("nothing left of the ':'; drop it for one tensor", text=text, column=pieces[0].column)
    seen: dict[Atom, _Piece] = {}
    nesting = tuple(_nesting_axis(text, piece, seen) for piece in pieces[: max(split, 0)])
    dims = _dims(text, pieces[split + 1 :], seen)
    if not dims:
        raise NotationError("no dims; a tensor has at least one", text=text, column=len(text) + 1)
    _check_factors(text, seen)
    _check_inside_a_block(text, seen)
    return Notation(nesting, dims)


def _tokenize(text: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            column = at + len(text[at:]) - len(text[at:].lstrip()) + 1
            hint = " (only kvplan.allocate makes a page of several parts)" * (text[column - 1] == "|")
            raise NotationError(f"unexpected character {text[column - 1]!r}{hint}", text=text, column=column)
        kind = match.lastgroup or ""
        pieces.append(_Piece(match.group(kind), match.start(kind) + 1))
        at = match.end()
    return pieces


def _atom(text: str, piece: _Piece, seen: dict[Atom, _Piece]) -> Atom:
    axis, dot, digits = piece.text.partition(".")
    if axis not in AXES:
        problem = f"unknown axis {quoted(piece.text)} (axes are {', '.join(AXES)})"
        raise NotationError(problem, text=text, column=piece.column)
    if dot and not _FACTOR.fullmatch(digits):
        problem = f"{quoted(piece.text)}: write the number of the factor after the dot, as in {axis}.0"
        raise NotationError(problem, text=text, column=piece.column)
    if dot and axis == "kv":
        raise NotationError("kv has extent 2 and cannot be split", text=text, column=piece.column)
    atom = Atom(axis, int(digits) if dot else None)
    if atom in seen:
        raise NotationError(f"{atom} is named twice", text=text, column=piece.column)
    for other in seen:
        if other.axis == axis and (other.factor is None) != (atom.factor is None):
            raise NotationError(f"{axis} is named both whole and split", text=text, column=piece.column)
    seen[atom] = piece
    return atom


def _nesting_axis(text: str, piece: _Piece, seen: dict[Atom, _Piece]) -> str:
    if piece.text not in NESTING_AXES:
        problem = f"{quoted(piece.text)} cannot stand left of the ':' (only {', '.join(NESTING_AXES)} can)"
        raise NotationError(problem, text=text, column=piece.column)
    return _atom(text, piece, seen).axis


def _dims(text: str, pieces: list[_Piece], seen: dict[Atom, _Piece]) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    group: list[Atom] | None = None  # the open parenthesis, if any
    opened = 0
    for piece in pieces:
        if piece.text == "(":
            if group is not None:
                raise NotationError("a '(' inside a '('", text=text, column=piece.column)
            group, opened = [], piece.column
        elif piece.text == ")":
            if group is None:
                raise NotationError("a ')' without its '('", text=text, column=piece.column)
            if not group:
                raise NotationError("an empty '()'; a dim of extent 1 is written 1", text=text, column=opened)
            dims.append(tuple(group))
            group = None
        elif piece.text[0].isdigit():
            if piece.text != "1" or group is not None:
                problem = (
                    f"{quoted(piece.text)}: the only number is 1, a dim of its own; extents come from shapes or sizes"
                )
                raise NotationError(problem, text=text, column=piece.column)
            dims.append(())
        else:
            atom = _atom(text, piece, seen)
            if group is None:
                dims.append((atom,))
            else:
                group.append(atom)
    if group is not None:
        raise NotationError("a '(' that is never closed", text=text, column=opened)
    return tuple(dims)


def _check_factors(text: str, seen: dict[Atom, _Piece]) -> None:
    """Check that factors of a split axis are numbered 0, 1, ... without a gap, and that there are two or more."""
    for atom, piece in seen.items():
        if atom.factor is None:
            continue
        numbers = {other.factor for other in seen if other.axis == atom.axis}
        missing = set(range(max(2, len(numbers)))) - numbers
        if missing:
            problem = f"{atom.axis} is split but {atom.axis}.{min(missing)} is missing"
            raise NotationError(problem, text=text, column=piece.column)


def _check_inside_a_block(text: str, seen: dict[Atom, _Piece]) -> None:
    """Check that a block holds token slots or opaque sub-blocks, and not both."""
    first = {atom.axis: piece for atom, piece in reversed(seen.items())}
    if "token" in first and "subblock" in first:
        column = max(first["token"].column, first["subblock"].column)
        raise NotationError("token and subblock exclude each other: a sub-block is opaque", text=text, column=column)
