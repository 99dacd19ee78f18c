"""Transfers of :class:`kvplan.nixl.NixlAgent` that NIXL fails: an error, and no handle is left."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, TransferError
from kvplan.nixl import NixlAgent
from tests.nixl.double import Agent, Network

FAILURES = ["make", "post", "look", "err", "half"]


@pytest.fixture(params=["load", "store"])
def met(request):
    """A network, two caches that differ, the peer, and the program between them; all handles come back."""
    network, mine = Network(), np.zeros((3, 8, 64), np.uint8)
    theirs = np.arange(mine.size, dtype=np.uint64).astype(np.uint8).reshape(8, 3, 64)
    caches = KVLayout.from_tensors("layer block dim", mine), KVLayout.from_tensors("block layer dim", theirs)
    with (
        NixlAgent("me", {"kv": caches[0]}, agent=Agent(network, "me")) as me,
        NixlAgent("you", {"kv": caches[1]}, agent=Agent(network, "you")) as you,
    ):
        peer = me.meet(you.card())
        sides = [me.layouts["kv"], peer.layouts["kv"]]
        program = kvplan.compile(*(sides if request.param == "store" else sides[::-1]))
        yield network, mine, theirs, peer, program
    network.check_released()


@pytest.mark.parametrize("call", FAILURES)
def test_what_fails_is_an_error_and_the_next_transfer_moves(met, call):
    network, *_, peer, program = met
    network.failures = [call]
    with pytest.raises(TransferError, match="'you' failed"):
        peer.submit(program.plan([1, 4], [2, 5])).result()
    again = program.plan([3], [6])
    assert peer.submit(again).result().nbytes == again.nbytes
