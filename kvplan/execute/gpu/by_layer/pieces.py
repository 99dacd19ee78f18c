"""The run tables of the pieces that a transfer by layer is cut into."""

from __future__ import annotations

import numpy as np

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
