"""The list of mutants is up to date: each of its texts stands once in the code, and its tests exist."""

from __future__ import annotations

from tests.deep import mutants


def test_every_mutant_can_still_be_made():
    assert mutants.stale() == []


def test_no_mutant_is_the_code_itself():
    assert all(mutant.text != mutant.mutated for mutant in mutants.MUTANTS)
