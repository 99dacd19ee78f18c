"""Small runs of what `make deep` runs for hours; and the list of mutants is up to date."""

from __future__ import annotations

import pytest

from tests.deep import mutants, soak
from tests.deep.agents.__main__ import main


@pytest.mark.slow
def test_transfers_and_kills_of_agents(capsys):
    assert main(["--seed", "20", "--transfers", "400", "--rounds", "4"]) == 0
    assert capsys.readouterr().out.count("nothing wrong, nothing left") == 2


@pytest.mark.slow
def test_random_transfers_move_every_byte_and_leave_nothing():
    soak.soak(seed=1, transfers=1_500)


def test_every_mutant_can_still_be_made():
    assert mutants.stale() == []


def test_no_mutant_is_the_code_itself():
    assert all(mutant.text != mutant.mutated for mutant in mutants.MUTANTS)
