"""What one document may use: exactly so much, and no more."""

from __future__ import annotations

import pytest

from kvplan import LayoutError
from kvplan.base.limits import LIMITS, Budget


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("components", LIMITS.components),
        ("views", LIMITS.views),
        ("tensors", LIMITS.tensors),
        ("overlap_steps", LIMITS.overlap_steps),
    ],
)
def test_all_of_a_budget_can_be_used_and_no_more(kind, most):
    budget = Budget()
    budget.use(kind, most - 1)
    budget.use(kind, 1)
    with pytest.raises(LayoutError, match=f"{most:,}"):
        budget.use(kind, 1)
