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


OK = [
    (all_pairs(2, linked(18)), "from every GPU to every other: by NVLink, 18 links"),
    (
        all_pairs(4, islands(2, 4)),
        (
            "cuda:0 to cuda:1, cuda:1 to cuda:0, cuda:2 to cuda:3, cuda:3 to cuda:2: by NVLink, 4 links; "
            "cuda:0 to cuda:2, cuda:0 to cuda:3, cuda:1 to cuda:2, cuda:1 to cuda:3 and 4 more pairs: by PCIe"
        ),
    ),
]
REFUSED = [
    (
        all_pairs(3, without(1)),
        (
            f"cuda:0 to cuda:1, cuda:1 to cuda:0, cuda:1 to cuda:2, cuda:2 to cuda:1: no access ({WHY}); "
            "cuda:0 to cuda:2, cuda:2 to cuda:0: by NVLink, 18 links"
        ),
    ),
]


@pytest.mark.parametrize(("peers", "what"), OK)
def test_gpus_that_reach_one_another(peers, what):
    found = finding(peers)
    assert (found.state, found.what, found.advice) == ("ok", what, "")


@pytest.mark.parametrize(("peers", "what"), REFUSED)
def test_gpus_that_do_not_reach_one_another(peers, what):
    found = finding(peers)
    assert (found.state, found.what) == ("warning", what)
    assert found.advice.startswith("see nvidia-smi topo -p2p r; switch MIG off; ")


@pytest.mark.parametrize(("iommu", "state"), [("DMA-FQ", "warning"), ("identity", "ok"), (None, "ok")])
def test_pcie_behind_an_iommu(iommu, state):
    found = finding(all_pairs(2, linked(0)), iommu=iommu)
    assert found.state == state
    if state == "warning":
        only = f"over PCIe, CUDA supports an IOMMU that translates ({iommu}) in a virtual machine only"
        assert found.what == f"from every GPU to every other: by PCIe; {only}"
        assert "iommu=pt" in found.advice


def test_links_that_nvml_does_not_tell():
    found = finding(all_pairs(2, linked(None)))
    assert found.state == "unknown"
    assert found.what == "from every GPU to every other: by a link that NVML does not tell"
    assert found.advice == "let a container have NVML: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    assert finding(all_pairs(2, linked(None)), missing={"nvidia-ml-py": "not installed"}).advice == (
        "pip install nvidia-ml-py"
    )
