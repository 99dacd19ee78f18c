"""Cards that are garbage, cut off or changed are refused by an error in words, and nothing is left of them."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import KVPlanError
from tests.contract.peers.transports import every


@pytest.fixture
def refused(pair):
    """A function that lets the near process meet a card that is none."""
    before = pair.near.holds()

    def check(card):
        with pytest.raises(KVPlanError) as caught:
            pair.near.meet(card)
        assert 10 < len(str(caught.value)) < 2000
        pair.near.holds_no_more_than(before)
        return str(caught.value)

    yield check
    pair.move([1, 2], [3, 4], reading=False)
    pair.move([5], [6], reading=True)
    pair.check()


GARBAGE = [b"", b"\x00", b"[]", b"{}", b"null", b"3", b"\xff" * 100, b"[" * 100_000, b'{"schema": "kvplan.agent/99"}']


@every
@pytest.mark.parametrize("garbage", [*GARBAGE, 3, None, "text"], ids=range(len(GARBAGE) + 3))
def test_garbage(pair, refused, garbage):
    assert "card" in refused(garbage)


@every
def test_truncated_cards(pair, refused):
    card = pair.far.card()
    for length in np.random.default_rng(1).integers(1, len(card) - 1, 25).tolist():
        refused(card[:length])
