"""The pieces that a transfer by layer is cut into: their run tables, and their calls."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np

from kvplan.cuda.call_list import Segment
from kvplan.execute.gpu.arena import Piece
from kvplan.execute.gpu.tables import Table
from kvplan.layout.strides import Int64Array


class PieceTables:
    """The run tables of all pieces.

    Args:
        tables: a table for each piece.

    Attributes:
        headers: (pieces, 9) int64: the header of each table, without units.
    """

    def __init__(self, tables: list[Table]) -> None:
        self.headers: Int64Array = np.stack([table.header for table in tables])
        self._fresh = tables

    @property
    def fresh(self) -> bool:
        """Return whether the upload of a table is not known to have ended, so that streams must wait for it."""
        if self._fresh:
            self._fresh = [table for table in self._fresh if table.fresh]
        return bool(self._fresh)


class Written(NamedTuple):
    """The calls of a transfer by layer.

    Attributes:
        calls: the calls.
        marked: for each piece, the number of calls up to the record of its event.
        carried: if a launch must copy the slot of the headers to the GPU before the first call: the slot, the GPU
            memory, and the number of bytes; otherwise None.
    """

    calls: Segment
    marked: list[int]
    carried: tuple[Piece, Piece, int] | None = None


@cache
def layer_loops() -> ModuleType:
    """Return the module of the compiled loops. The first call imports numba."""
    from kvplan.execute.gpu.by_layer import layer_loops as loaded

    return loaded
