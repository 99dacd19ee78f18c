"""What one document may use: exactly so much, and no more."""

from __future__ import annotations

import pytest

from kvplan import LayoutError
from kvplan.base.limits import COMPONENTS, OVERLAP_STEPS, TENSORS, VIEWS
from kvplan.layout.budget import Budget


@pytest.mark.parametrize(
    ("kind", "most"),
    [("components", COMPONENTS), ("views", VIEWS), ("tensors", TENSORS), ("steps", OVERLAP_STEPS)],
)
def test_all_of_a_budget_can_be_used_and_no_more(kind, most):
    use = getattr(Budget(), kind)
    use(most - 1)
    use(1)
    with pytest.raises(LayoutError, match=f"{most:,}"):
        use(1)
