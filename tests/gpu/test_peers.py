"""Two real GPUs: they reach each other, and access is enabled in the context of the one that asks."""

from __future__ import annotations

import pytest
import torch

from kvplan.cuda.device import Device
from kvplan.cuda.driver import ACCESS_FLAGS, MEMORY_TYPE
from kvplan.cuda.peers import link_between, links
from kvplan.measure.doctor import examine, gather
from tests.commands import python

READ_AND_WRITE = 3

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


@pytest.mark.parametrize(("gpu", "peer"), [(0, 1), (1, 0)])
def test_a_peer_is_enabled(gpu, peer):
    if not link_between(gpu, peer).reachable:
        pytest.skip(link_between(gpu, peer).why)
    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device=f"cuda:{peer}")
    device = Device(gpu)
    assert [device.enable_peer(peer), device.enable_peer(peer), Device(gpu).enable_peer(peer)] == [""] * 3
    with device.current():
        assert device.pointer(tensor.data_ptr(), ACCESS_FLAGS) == READ_AND_WRITE
        assert device.pointer(tensor.data_ptr(), MEMORY_TYPE) == 2  # of a GPU
        own = torch.full((1 << 20,), 7, dtype=torch.uint8, device=f"cuda:{gpu}")
        for ordinal in (gpu, peer):  # both are filled before the copy
            torch.cuda.synchronize(ordinal)
        stream, event = device.stream(), device.event()
        device.copy(tensor.data_ptr(), own.data_ptr(), 1 << 20, stream)
        device.record(event, stream)
        device.driver.check("cuEventSynchronize", device.driver.cuEventSynchronize(event))
    assert bool((tensor == 7).all())


CAPTURE = """
import threading

import torch

from kvplan.cuda.device import Device

tensor, device, answers = torch.zeros(1 << 10, device="cuda:0"), Device(0), []
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph, capture_error_mode="global"):
    tensor.add_(1)
    thread = threading.Thread(target=lambda: answers.append(device.enable_peer(1)))
    thread.start()
    thread.join()
    tensor.add_(1)
graph.replay()
torch.cuda.synchronize()
assert answers == [""], answers
assert float(tensor[0]) == 2
"""


def test_a_peer_is_enabled_while_another_thread_captures():
    if not link_between(0, 1).reachable:
        pytest.skip(link_between(0, 1).why)
    done = python("-c", CAPTURE)  # a fresh process, in which no pair is enabled
    assert done.returncode == 0, done.stderr


def test_gpus_that_are_not_there():
    missing = torch.cuda.device_count()
    why = f"there is no CUDA device {missing}; {missing} are visible"
    assert Device(0).enable_peer(missing) == f"cuda:0 cannot reach the memory of cuda:{missing}: {why}"
    assert link_between(0, missing).why == why
