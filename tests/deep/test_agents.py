"""A small run of `tests.deep.agents`."""

from __future__ import annotations

import pytest

from tests.deep.agents.__main__ import main

pytestmark = pytest.mark.slow


def test_transfers_kills_and_lies(capsys):
    assert main(["--seed", "20", "--transfers", "400", "--rounds", "4", "--cards", "300"]) == 0
    assert capsys.readouterr().out.count("nothing wrong, nothing left") == 3


def test_processes_share_two_hundred_rounds(capsys):
    assert main(["--seed", "20", "--transfers", "0", "--rounds", "200", "--cards", "0", "--workers", "2"]) == 0
    assert "rounds: 200 in" in (told := capsys.readouterr().out)
    assert "by 2 processes" in told
