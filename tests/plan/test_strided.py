"""Runs as 2-D copies by hand: which loop becomes the rows, and what is unrolled."""

from __future__ import annotations

import pytest

from kvplan.plan.descriptors import two_dimensional
from kvplan.program.program import Run


def test_the_longest_loop_becomes_the_rows_and_the_other_is_unrolled():
    short, long = (2, 100, 300), (3, 8, 20)
    expected = [Run(5, 7, 4, (long,)), Run(105, 307, 4, (long,))]
    assert two_dimensional(Run(5, 7, 4, (short, long))) == expected
    assert two_dimensional(Run(5, 7, 4, (long, short))) == expected


@pytest.mark.parametrize("backward", [(3, -8, 20), (3, 8, -20), (3, 0, 20), (3, 8, 0)])
def test_a_loop_that_does_not_run_forward_on_both_sides_is_unrolled_however_long(backward):
    _, src, dst = backward
    steps = [Run(50 + k * src, 70 + k * dst, 4, ()) for k in range(3)]
    assert two_dimensional(Run(50, 70, 4, (backward,))) == steps
    forward = (2, 100, 300)
    assert two_dimensional(Run(50, 70, 4, (forward, backward))) == [step._replace(loops=(forward,)) for step in steps]


def test_single_bytes_that_lie_together_on_one_side_are_rows_too():
    assert two_dimensional(Run(0, 0, 1, ((4, 1, 5),))) == [Run(0, 0, 1, ((4, 1, 5),))]
    assert two_dimensional(Run(0, 0, 1, ((4, 5, 1),))) == [Run(0, 0, 1, ((4, 5, 1),))]


def test_a_run_without_a_loop_is_one_row():
    assert two_dimensional(Run(3, 9, 64, ())) == [Run(3, 9, 64, ())]
