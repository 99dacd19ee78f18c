"""Laws of packed transfers: whatever the layouts, the ranks and the wire's faults, what is called done is right."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.agents.packed.drawn_pairs import manners, move_pair
from tests.agents.packed.simulated_wire import Faults
from tests.profiles import examples
from tests.strategies import cases, neighbour_cases


@examples(60)
@given(case=st.one_of(cases(), neighbour_cases()), manner=manners())
def test_without_failures_every_pair_arrives(case, manner, executor):
    """A late wire fails nothing."""
    assert move_pair(case, replace(manner, faults=Faults(late=manner.faults.late)), executor)


@examples(120)
@given(case=st.one_of(cases(), neighbour_cases()), manner=manners())
def test_what_is_called_done_is_right(case, manner, executor):
    move_pair(case, manner, executor)
