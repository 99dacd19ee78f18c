"""What does not nest ends within a budget."""

from __future__ import annotations

import random

import pytest

from kvplan import LayoutError
from kvplan.layout.components import Component, Form
from kvplan.layout.disjoint import check_disjoint


def overlap(*sets) -> bool:
    """Whether sets of bytes overlap, each of a first byte and factors."""
    components = [
        Component(k, "k", first, Form(block=factors, token=(), head=(), dim=()))
        for k, (first, factors) in enumerate(sets)
    ]
    try:
        check_disjoint(components)
    except LayoutError as error:
        if "share bytes" not in str(error):
            raise
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("count", [18, 24, 40])
def test_strides_of_like_size_end_in_an_error_within_the_budget(count):
    dice = random.Random(1)
    factors = tuple((2, dice.randrange(2**40, 2**41)) for _ in range(count))
    with pytest.raises(LayoutError, match=r"axes interleave .* after 2,097,152 steps; give strides that nest"):
        overlap((0, factors))
