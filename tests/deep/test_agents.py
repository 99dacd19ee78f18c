"""A small run of `tests.deep.agents`."""

from __future__ import annotations

import pytest

from tests.deep.agents.__main__ import main

pytestmark = pytest.mark.slow


def test_transfers_and_kills(capsys):
    assert main(["--seed", "20", "--transfers", "400", "--rounds", "4"]) == 0
    assert capsys.readouterr().out.count("nothing wrong, nothing left") == 2
