"""Layouts in pickles: facts and addresses, as in a dump, and no memory.

A pickle may be loaded anywhere, and of memory it could only hold a copy, at another address. So what comes out of one
says that its addresses are not of this process's memory, and nothing is moved through it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvplan.build import Built

if TYPE_CHECKING:
    from kvplan.layout import KVLayout


def facts_of(layout: KVLayout) -> tuple[Built, str]:
    """Parts and notation of a layout, without the tensors.

    >>> import numpy as np
    >>> from kvplan.layout import KVLayout
    >>> facts_of(KVLayout.from_tensors("block dim", np.zeros((8, 64), np.int8)))[0].regions[0].recorded
    True
    """
    regions = tuple(replace(r, owner=None, held=None, recorded=not r.virtual) for r in layout.regions)
    built = Built(
        layout.components, regions, layout.num_blocks, layout.block_tokens, layout.sizes, layout.dtype
    )  # fmt: skip
    return built, layout.notation


def layout_of_facts(built: Built, notation: str) -> KVLayout:
    """What a pickled layout is loaded as."""
    from kvplan.layout import KVLayout

    return KVLayout(built, notation=notation)
