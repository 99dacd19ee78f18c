"""Two real GPUs: what is told of their links, without a context of theirs."""

from __future__ import annotations

import pytest
import torch

from kvplan.cuda.peers import link_between, links
from kvplan.measure.doctor import examine, gather
from tests.commands import python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]


def test_all_pairs_are_told_as_torch_sees_them():
    found = links()
    visible = range(torch.cuda.device_count())
    assert [(link.gpu, link.peer) for link in found] == [(a, b) for a in visible for b in visible if a != b]
    for link in found:
        assert link.reachable == torch.cuda.can_device_access_peer(link.gpu, link.peer)
        assert link.reachable == (link.why == "")
        assert link == link_between(link.gpu, link.peer)
    facts = gather("cuda:0")
    assert facts.peers == found
    assert "peers" not in facts.missing
    assert "peers" in {finding.name for finding in examine(facts)}


ASK = """
import ctypes
from ctypes import byref, c_int, c_uint

from kvplan.cuda.driver import driver
from kvplan.cuda.peers import links

links()
library = ctypes.CDLL("libcuda.so.1")
for ordinal in range(driver().devices()):
    flags, active = c_uint(), c_int()
    assert library.cuDevicePrimaryCtxGetState(driver().handle(ordinal), byref(flags), byref(active)) == 0
    assert active.value == 0, ordinal
"""


def test_asking_opens_no_context():
    """A context takes hundreds of MB of a GPU's memory."""
    done = python("-c", ASK)
    assert done.returncode == 0, done.stderr
