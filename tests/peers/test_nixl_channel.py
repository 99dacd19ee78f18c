"""LMCache 0.5.6's own transfer channel over NIXL, with kvplan's agent and with NIXL's by the same script."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import torch
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel.impl import nixl_impl

from kvplan.engines.nixl import Agent
from tests.patience import until

nixl_api = pytest.importorskip("nixl._api", reason="NIXL is not installed: pip install nixl")
pytestmark = pytest.mark.peers

PAGE, PAGES = 256, 32


def free_port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


class Side:
    """A context of LMCache with an arena."""

    def __init__(self, seed):
        self.arena = torch.zeros(PAGES, PAGE, dtype=torch.uint8).share_memory_().numpy()
        self.arena[:] = np.random.default_rng(seed).integers(0, 256, (PAGES, PAGE), np.uint8)
        self.url = f"127.0.0.1:{free_port()}"
        described = L1MemoryDesc(ptr=self.arena.ctypes.data, size=self.arena.nbytes, align_bytes=PAGE)
        self.context = nixl_impl.NixlTransferChannelContext(described, self.url, self.url)

    def pages(self, *pages):
        return self.context.get_transfer_channel_address([(page * PAGE, PAGE) for page in pages])


@pytest.mark.parametrize("kind", ["nixl", "kvplan"])
def test_pages_are_read_from_a_peer(kind, monkeypatch, caplog):
    caplog.set_level("INFO", "kvplan.engines.nixl")
    own = nixl_api.nixl_agent
    monkeypatch.setattr(nixl_impl, "_load_nixl", lambda: (own, nixl_api.nixl_agent_config))
    if kind == "kvplan":
        monkeypatch.setattr(nixl_impl, "_load_nixl", lambda: (Agent, nixl_api.nixl_agent_config))
    here, there = Side(1), Side(2)
    try:
        client = here.context.get_transfer_channel_client(there.url)
        wanted = here.arena.copy()
        for mine, its in (([3, 4, 9], [0, 7, 8]), ([5], [31])):
            task = client.submit_read(here.pages(*mine), there.pages(*its))
            found = []
            until(lambda task=task, found=found: found.append(client.query_read_status(task)) or found[-1].finished)
            assert found[-1].succeeded_mask == [True] * len(mine)
            wanted[mine] = there.arena[its]
        np.testing.assert_array_equal(here.arena, wanted)
        assert ("kvplan takes over transfers with" in caplog.text) == (kind == "kvplan")
        back = there.context.get_transfer_channel_client(here.url)  # the other side has met this one, too
        task = back.submit_read(there.pages(1), here.pages(2))
        until(lambda: back.query_read_status(task).finished)
        np.testing.assert_array_equal(there.arena[1], here.arena[2])
    finally:
        here.context.close()
        there.context.close()
