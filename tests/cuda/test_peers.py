"""The links between GPUs, of machines that are made up."""

from __future__ import annotations

import pytest

from kvplan.cuda.peers import link_between, links
from tests.cuda.fake_system import without_nvml
from tests.cuda.peer_topologies import Topology, all_pairs, linked, reached, refused

SWITCHED = Topology(8, {gpu: ["switch"] * 18 for gpu in range(8)})
BRIDGED = Topology(4, {0: [1] * 4, 1: [0] * 4, 2: [3] * 4, 3: [2] * 4})
CUBE = Topology(4, {0: [1, 2, 1], 1: [0, 0, 3], 2: [0, 3, 3], 3: [2, 1, 2]})
REFUSED = "the driver allows no peer access between them"


def seen(topology, fakes):
    topology.play(*fakes)
    return links()


def nvlinks(found):
    return {(link.gpu, link.peer): link.nvlinks for link in found}


@pytest.mark.parametrize("count", [2, 4, 8])
def test_gpus_behind_a_switch(fakes, count):
    found = seen(Topology(count, SWITCHED.ports), fakes)
    assert found == all_pairs(count, linked(18))
    assert {(link.key, link.words) for link in found} == {("nvlink18", "NVLink, 18 links")}
    assert fakes[1].calls.count("nvmlInit") == fakes[1].calls.count("nvmlShutdown") == 1
    assert not fakes[0].named("cuDevicePrimaryCtxRetain")  # no context is opened
    assert not fakes[0].named("cuCtxEnablePeerAccess")


def test_direct_links_are_counted_for_the_gpu_at_their_other_end(fakes):
    bridged = {(0, 1): 4, (1, 0): 4, (2, 3): 4, (3, 2): 4}
    found = nvlinks(seen(BRIDGED, fakes))
    assert {pair: count for pair, count in found.items() if count} == bridged
    assert set(found.values()) == {0, 4}
    one_way = {(0, 1): 2, (0, 2): 1, (0, 3): 0, (1, 2): 0, (1, 3): 1, (2, 3): 2}
    assert nvlinks(seen(CUBE, fakes)) == one_way | {(peer, gpu): count for (gpu, peer), count in one_way.items()}


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (1, "the chipset does not support peer access"),
        (5, REFUSED),
        (0, REFUSED),  # NVML sees no obstacle
    ],
)
def test_a_refused_pair_has_nvml_s_cause(fakes, status, why):
    found = seen(Topology(2, refused={(0, 1): status}), fakes)
    assert found == (refused(0, 1, why, 0), reached(1, 0, 0))


def absent(monkeypatch, nvml):
    without_nvml(monkeypatch)


def knows_no_gpu(monkeypatch, nvml):
    nvml.refuses.add("nvmlDeviceGetHandleByPciBusId")


def tells_no_status(monkeypatch, nvml):
    nvml.refuses.add("nvmlDeviceGetP2PStatus")


@pytest.mark.parametrize("nvml", [absent, knows_no_gpu, tells_no_status])
def test_links_that_nvml_does_not_tell(fakes, monkeypatch, nvml):
    Topology(2, SWITCHED.ports, refused={(0, 1): 5}).play(*fakes)
    nvml(monkeypatch, fakes[1])
    found = links()
    assert found == (refused(0, 1, REFUSED, None), reached(1, 0, None))
    assert (found[1].key, found[1].words) == ("link", "a link that NVML does not tell")


def test_one_pair(fakes):
    SWITCHED.play(*fakes)
    assert link_between(3, 4) == reached(3, 4, 18)
    assert {arguments[1:] for arguments in fakes[0].named("cuDeviceCanAccessPeer")} == {(3, 4)}
