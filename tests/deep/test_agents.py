"""A small run of `tests.deep.agents`."""

from __future__ import annotations

import pytest

from tests.deep import agents

pytestmark = [pytest.mark.slow, pytest.mark.slow]


def test_transfers_kills_and_lies(capsys):
    assert agents.main(["--seed", "20", "--transfers", "400", "--rounds", "6", "--cards", "300"]) == 0
    assert capsys.readouterr().out.count("nothing wrong, nothing left") == 3
