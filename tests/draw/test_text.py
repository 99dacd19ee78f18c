"""A block in characters: golden screens at 80 and 60 columns, and without block characters."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import KVLayout
from kvplan.draw.block import block_picture
from kvplan.draw.text import NARROWEST, block_lines, plain
from tests.commands import hold_screen
from tests.draw.drawn_layouts import CASES, PADDED_PAGE


def screen(given, width):
    return plain(block_lines(block_picture(KVLayout.from_spec(given).built), width)).split("\n")


def test_a_padded_page_at_80_columns():
    hold_screen("block", "\n".join(screen(PADDED_PAGE, 80)) + "\n")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 133])
@pytest.mark.parametrize("name", CASES)
def test_every_line_fits(name, width):
    assert max(map(len, screen(CASES[name], width))) <= max(width, NARROWEST)


def test_allocations_may_descend_in_memory():
    tensors = sorted((np.zeros((400, 16, 128), np.uint8) for _ in range(6)), key=lambda one: -one.ctypes.data)
    layout = KVLayout.from_tensors("layer: block token dim", tensors)
    assert block_lines(block_picture(layout.built), 120)
    assert "<svg" in layout._repr_html_()
