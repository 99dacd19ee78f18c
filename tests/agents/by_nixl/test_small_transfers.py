"""Small direct transfers by NIXL: their callers end them, no thread is woken for them, and looks make room for them."""

from __future__ import annotations

import threading

import pytest

from kvplan import TransferError
from tests.agents.by_nixl.known_agents import heard, looks, same
from tests.patience import PATIENCE, until


@looks(2)
def test_nobody_need_ask(pair):
    """The lane's thread finds it by itself."""
    pair.peer.submit(pair.load.plan([1], [1]), note=b"read", way="direct")
    assert heard(pair.you) == [("me", b"read")]
    until(lambda: pair.me.stats().transfers == 1)


@looks(5)
@pytest.mark.parametrize("failure", ["post", "err"])
def test_a_failure_is_told_whoever_ends_it(pair, failure):
    pair.network.failures = [failure]
    transfer = pair.peer.submit(pair.load.plan([1], [1]), way="direct")
    with pytest.raises(TransferError, match="reading from 'you' failed"):
        transfer.synchronize(PATIENCE)
    assert pair.me.stats().failed == 1


@looks(3)
def test_several_threads_submit_and_wait(pair):
    """A lane that has gone to sleep until one submit is over goes on with the transfers of the others."""
    errors = []

    def work(number):
        try:
            for _ in range(60):
                pair.peer.submit(pair.load.plan([number], [number]), way="direct").synchronize(PATIENCE)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(same(pair, number, number) for number in range(4))
    assert (pair.me.stats().transfers, pair.me.stats().in_flight) == (240, 0)
