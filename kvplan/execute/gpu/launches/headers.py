"""Headers of launches, as the copy kernel reads them: the units and items of a run group, or flat descriptors."""

from __future__ import annotations

from struct import Struct

from kvplan.execute.gpu.arena import Piece
from kvplan.layout.strides import Int64Array

HEADER = 9  # words
PACKED = Struct(f"={HEADER}q")  # writes all words of a header in one call, without a Python object per word


def write_units(
    piece: Piece, base: int, header: int, at: int, units: Int64Array, table: tuple[int, ...], headers: int = 1
) -> None:
    """Write a header, and its units, into a slot.

    Args:
        piece: the slot.
        base: address at which the kernel reads the slot's first byte.
        header: index of the header among the headers of the slot.
        at: index of the units' first word in the slot.
        units: (2, n) int64: source and destination addresses.
        table: header words of the run table.
        headers: number of headers in the slot.
    """
    words, count, first = piece.words, units.shape[1], base + 8 * at
    _, items, chunks, _, _, *columns, _ = table
    PACKED.pack_into(words, 8 * HEADER * header, count, items, chunks, first, first + 8 * count, *columns, headers)
    words[at : at + 2 * count] = units.ravel()


def write_flat(piece: Piece, columns: Int64Array, chunks: int, base: int | None = None) -> None:
    """Write into a slot: a header, one unit at address 0, and descriptors (3, n) as its items.

    Args:
        piece: the slot.
        columns: the descriptors.
        chunks: chunks per item.
        base: address at which the kernel reads the slot's first byte; by default the slot's own.
    """
    words, count = piece.words, columns.shape[1]
    zero = (piece.address if base is None else base) + 8 * HEADER
    items = zero + 8
    words[:HEADER] = (1, count, chunks, zero, zero, items, items + 8 * count, items + 16 * count, 1)
    words[HEADER] = 0
    words[HEADER + 1 : HEADER + 1 + 3 * count] = columns.ravel()
