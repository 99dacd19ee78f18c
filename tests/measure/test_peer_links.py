"""The doctor's finding of the links between GPUs: one line, however many GPUs there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.measure.doctor import examine
from tests.cuda.peer_topologies import all_pairs, linked, reached, refused
from tests.measure.doctor_facts import HEALTHY

WHY = "the PCIe topology does not support peer access"


def finding(peers, **changed):
    facts = replace(HEALTHY, peers=peers, **changed)
    return {one.name: one for one in examine(facts)}.get("peers")


def islands(size, nvlinks, across=0):
    """NVLink within islands of GPUs, another link across."""
    return lambda gpu, peer: reached(gpu, peer, nvlinks if gpu // size == peer // size else across)


def without(*gpus, nvlinks=18):
    """GPUs that no other reaches; the others have NVLink."""
    return lambda gpu, peer: refused(gpu, peer, WHY, 0) if {gpu, peer} & set(gpus) else reached(gpu, peer, nvlinks)


def one_way(gpu, peer):
    return reached(gpu, peer, 0) if gpu < peer else refused(gpu, peer, WHY, 0)


def apart(gpu, peer):
    """Within each pair of GPUs in a row no access; PCIe across."""
    return refused(gpu, peer, WHY, 0) if gpu // 2 == peer // 2 else reached(gpu, peer, 0)


def one_way_between_first_and_last(gpu, peer):
    return one_way(gpu, peer) if {gpu, peer} == {0, 2} else reached(gpu, peer, 18)


MORE = "so do 2 more groups of GPUs (see kvplan doctor --json)"
BY_PCIE = "all other pairs reach one another by PCIe"
CANNOT = f"all other pairs cannot reach one another ({WHY})"
OK = [
    (all_pairs(2, linked(18)), ["cuda:0 and cuda:1 reach one another by NVLink, 18 links"]),
    (all_pairs(2, linked(0)), ["cuda:0 and cuda:1 reach one another by PCIe"]),
    (all_pairs(2, linked(1)), ["cuda:0 and cuda:1 reach one another by NVLink, 1 link"]),
    (all_pairs(4, linked(12)), ["cuda:0-3 reach one another by NVLink, 12 links"]),
    (all_pairs(8, linked(18)), ["cuda:0-7 reach one another by NVLink, 18 links"]),
    (
        all_pairs(4, islands(2, 4)),
        ["cuda:0 and cuda:1 reach one another by NVLink, 4 links, so do cuda:2 and cuda:3", BY_PCIE],
    ),
    (all_pairs(8, islands(4, 6)), ["cuda:0-3 reach one another by NVLink, 6 links, so do cuda:4-7", BY_PCIE]),
    (
        all_pairs(3, lambda gpu, peer: reached(gpu, peer, 17 if 2 in {gpu, peer} else 18)),
        [
            "cuda:0 and cuda:1 reach one another by NVLink, 18 links",
            "all other pairs reach one another by NVLink, 17 links",
        ],
    ),
    (
        all_pairs(24, islands(4, 4)),
        [
            f"cuda:0-3 reach one another by NVLink, 4 links, so do cuda:4-7, so do cuda:8-11, so do cuda:12-15, {MORE}",
            BY_PCIE,
        ],
    ),
]
REFUSED = [
    (all_pairs(2, without(1)), [f"cuda:0 and cuda:1 cannot reach one another ({WHY})"]),
    (all_pairs(8, without(*range(8))), [f"cuda:0-7 cannot reach one another ({WHY})"]),
    (all_pairs(4, without(3)), ["cuda:0-2 reach one another by NVLink, 18 links", CANNOT]),
    (all_pairs(4, without(1)), ["cuda:0, cuda:2 and cuda:3 reach one another by NVLink, 18 links", CANNOT]),
    (
        all_pairs(4, apart),
        [f"cuda:0 and cuda:1 cannot reach one another ({WHY}), nor can cuda:2 and cuda:3", BY_PCIE],
    ),
    (all_pairs(2, one_way), [f"cuda:0 reaches cuda:1 by PCIe, cuda:1 cannot reach cuda:0 ({WHY})"]),
    (
        all_pairs(3, one_way_between_first_and_last),
        [
            f"cuda:0 reaches cuda:2 by PCIe, cuda:2 cannot reach cuda:0 ({WHY})",
            "all other pairs reach one another by NVLink, 18 links",
        ],
    ),
]


@pytest.mark.parametrize(("peers", "clauses"), OK)
def test_gpus_that_reach_one_another(peers, clauses):
    found = finding(peers)
    assert (found.state, found.what, found.advice) == ("ok", "; ".join(clauses), "")


@pytest.mark.parametrize(("peers", "clauses"), REFUSED)
def test_gpus_that_do_not_reach_one_another(peers, clauses):
    found = finding(peers)
    assert (found.state, found.what) == ("warning", "; ".join(clauses))
    assert found.advice.startswith("see nvidia-smi topo -p2p r; switch MIG off; ")


def test_many_pairs_that_differ_by_direction_are_cut():
    found = finding(all_pairs(4, one_way))
    assert found.what.count("reaches") == 4
    assert found.what.endswith("; 2 more pairs differ by direction (see kvplan doctor --json)")


@pytest.mark.parametrize(
    ("iommu", "hypervisor", "state"),
    [
        ("DMA-FQ", "", "warning"),
        ("DMA", None, "warning"),
        ("DMA", "QEMU", "ok"),
        ("identity", "", "ok"),
        (None, "", "ok"),
    ],
)
def test_pcie_behind_an_iommu(iommu, hypervisor, state):
    found = finding(all_pairs(2, linked(0)), iommu=iommu, hypervisor=hypervisor)
    assert found.state == state
    if state == "warning":
        unsupported = f"over PCIe, CUDA does not support that behind an IOMMU that translates ({iommu})"
        assert found.what == f"cuda:0 and cuda:1 reach one another by PCIe; {unsupported}"
        assert "iommu=pt" in found.advice


def test_nvlink_passes_by_the_iommu():
    assert finding(all_pairs(4, linked(18)), iommu="DMA").state == "ok"
    assert finding(all_pairs(4, islands(2, 4)), iommu="DMA").state == "warning"


def test_links_that_nvml_does_not_tell():
    found = finding(all_pairs(2, linked(None)))
    assert found.state == "unknown"
    assert found.what == "cuda:0 and cuda:1 reach one another by a link that NVML does not tell"
    assert found.advice == "let a container have NVML: NVIDIA_DRIVER_CAPABILITIES=compute,utility"


def test_one_gpu_and_no_driver_are_no_finding():
    assert finding(None) is None


def test_links_that_could_not_be_found_out():
    found = finding(None, missing={"peers": "cuDeviceGetCount returned 999"})
    assert (found.state, found.what) == ("unknown", "cuDeviceGetCount returned 999")
