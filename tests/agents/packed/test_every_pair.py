"""Laws of packed transfers: whatever the layouts, the ranks and the wire's faults, what is called done is right."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.agents.packed.drawn_pairs import faults, manners, move_pair, move_ranks
from tests.agents.packed.simulated_wire import Faults
from tests.profiles import examples
from tests.ranks.topologies import reshards
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


@examples(25)
@given(case=reshards(ranks=4), wrong=faults(), seed=st.integers(0, 2**32))
def test_every_pair_of_ranks_at_once(case, wrong, seed, executor):
    move_ranks(case, wrong, seed, executor)
