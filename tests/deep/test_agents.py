"""A small run of `tests.deep.agents`."""

from __future__ import annotations

import pytest

from tests.deep.agents.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.slow]


def test_transfers_kills_and_lies(capsys):
    assert main(["--seed", "20", "--transfers", "400", "--rounds", "6", "--cards", "300"]) == 0
    assert capsys.readouterr().out.count("nothing wrong, nothing left") == 3


def test_processes_share_the_rounds(capsys):
    assert main(["--seed", "20", "--transfers", "0", "--rounds", "5", "--cards", "0", "--workers", "2"]) == 0
    assert "rounds: 5 in" in (told := capsys.readouterr().out)
    assert "by 2 processes" in told
