"""A small run of `tests.deep.wires`."""

from __future__ import annotations

from tests.deep.wires import main


def test_pairs_and_memory(capsys):
    assert main(["--seed", "21", "--pairs", "120", "--transfers", "200"]) == 0
    told = capsys.readouterr().out
    assert "nothing wrong, no slot lost" in told
    assert "transfers: 200, " in told
