"""The links between GPUs, of machines that are made up."""

from __future__ import annotations

import ctypes

import pytest

from kvplan.cuda import driver as cuda
from kvplan.cuda.peers import link_between, links
from kvplan.errors import TransferError
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


def test_one_gpu_has_no_links(fakes):
    assert seen(Topology(1), fakes) == ()
    assert fakes[1].calls == []


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


def test_the_end_with_fewer_links_to_the_switch_counts(fakes):
    found = seen(Topology(3, {0: ["switch"] * 18, 1: ["switch"] * 17, 2: ["switch"] * 18}), fakes)
    assert nvlinks(found) == {(0, 1): 17, (0, 2): 18, (1, 0): 17, (1, 2): 17, (2, 0): 18, (2, 1): 17}


def test_pcie_only(fakes):
    found = seen(Topology(2), fakes)
    assert found == all_pairs(2, linked(0))
    assert (found[0].key, found[0].words) == ("pcie", "PCIe")


def test_a_gpu_outside_the_switch(fakes):
    found = seen(Topology(3, {0: ["switch"] * 12, 1: ["switch"] * 12}), fakes)
    assert nvlinks(found) == {(0, 1): 12, (1, 0): 12, (0, 2): 0, (2, 0): 0, (1, 2): 0, (2, 1): 0}


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (1, "the chipset does not support peer access"),
        (2, "one of the GPUs does not support peer access"),
        (3, "the PCIe topology does not support peer access"),
        (4, "a setting of the driver disables peer access"),
        (5, REFUSED),
        (0, REFUSED),  # NVML sees no obstacle
    ],
)
def test_a_refused_pair_has_nvml_s_cause(fakes, status, why):
    found = seen(Topology(2, refused={(0, 1): status}), fakes)
    assert found == (refused(0, 1, why, 0), reached(1, 0, 0))


def absent(monkeypatch, nvml):
    without_nvml(monkeypatch)


def does_not_start(monkeypatch, nvml):
    nvml.refuses.add("nvmlInit")


def knows_no_gpu(monkeypatch, nvml):
    nvml.refuses.add("nvmlDeviceGetHandleByPciBusId")


def tells_no_status(monkeypatch, nvml):
    nvml.refuses.add("nvmlDeviceGetP2PStatus")


def tells_no_other_end(monkeypatch, nvml):
    nvml.refuses |= {"nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo"}


@pytest.mark.parametrize("nvml", [absent, does_not_start, knows_no_gpu, tells_no_status, tells_no_other_end])
def test_links_that_nvml_does_not_tell(fakes, monkeypatch, nvml):
    Topology(2, SWITCHED.ports, refused={(0, 1): 5}).play(*fakes)
    nvml(monkeypatch, fakes[1])
    found = links()
    assert found == (refused(0, 1, REFUSED, None), reached(1, 0, None))
    assert (found[1].key, found[1].words) == ("link", "a link that NVML does not tell")


def test_a_gpu_without_a_bus_id(fakes):
    SWITCHED.play(*fakes)
    fakes[0].codes["cuDeviceGetPCIBusId"] = 1
    assert link_between(3, 4) == reached(3, 4, None)


def test_one_pair(fakes):
    SWITCHED.play(*fakes)
    assert link_between(3, 4) == reached(3, 4, 18)
    assert {arguments[1:] for arguments in fakes[0].named("cuDeviceCanAccessPeer")} == {(3, 4)}


@pytest.mark.parametrize("pair", [(0, 8), (8, 0), (-1, 0)])
def test_a_gpu_that_is_not_there_is_a_reason(fakes, pair):
    SWITCHED.play(*fakes)
    (ordinal,) = set(pair) - {0}
    assert link_between(*pair) == refused(*pair, f"there is no CUDA device {ordinal}; 8 are visible", None)


def test_a_driver_that_does_not_answer_is_a_reason(fakes):
    SWITCHED.play(*fakes)
    fakes[0].codes["cuDeviceCanAccessPeer"] = 719
    why = "cuDeviceCanAccessPeer returned CUDA_ERROR_PLAYED (719, it was played)"
    assert link_between(0, 1) == refused(0, 1, why, None)


def test_one_gpu_twice_is_no_pair(fakes):
    with pytest.raises(TransferError, match="a link joins two GPUs, and cuda:1 is given twice"):
        link_between(1, 1)


def test_no_driver(monkeypatch):
    def load(path):
        raise OSError(f"{path}: no such file")

    cuda.loaded.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", load)
    for asked in (links, lambda: link_between(0, 1)):
        with pytest.raises(TransferError, match="there is no CUDA driver"):
            asked()
