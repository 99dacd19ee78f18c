"""The doctor: every check in every state, of facts written down."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvplan.cuda.machine import Link
from kvplan.measure.doctor import CHECKS, Facts, examine
from kvplan.measure.facts import ProfileInUse
from tests.cuda.fake_system import PCI
from tests.measure.doctor_facts import GIB, H100, HEALTHY


def finding(name, facts):
    return {one.name: one for one in examine(facts)}.get(name)


def test_a_healthy_machine():
    found = examine(HEALTHY)
    assert {one.state for one in found} == {"ok"}
    assert not [one for one in found if one.advice]
    assert [one.name for one in found] == [
        "driver", "GPU", "batch copies", "link", "NUMA", "connections", "IOMMU", "profile", "torch", "Triton",
        "numba", "locked memory", "host memory",
    ]  # fmt: skip
    assert len(found) == len(CHECKS) - 1  # all but that of links between GPUs


def linked(*numbers):
    return {"machine": replace(H100, link=Link(*numbers))}


def placed(node):
    return {"machine": replace(H100, numa_node=node)}


def packaged(**given):
    versions = dict(HEALTHY.packages)
    for name, version in given.items():
        versions.pop(name)
        versions |= {} if version is None else {name: version}
    return {"packages": versions}


BIND = "numactl --cpunodebind=1 --membind=1"
NO_DRIVER = {"cuda": None, "batch": None, "machine": None}
CASES = [
    ("driver", NO_DRIVER, "problem", "no CUDA driver: only the host path works", "docker run --gpus all"),
    (
        "driver",
        NO_DRIVER | {"missing": {"cuda": "cuInit returned CUDA_ERROR_NO_DEVICE (100, none)"}},
        "problem",
        "cuInit returned CUDA_ERROR_NO_DEVICE (100, none): only the host path works",
        "nvidia-smi and dmesg",
    ),
    ("driver", {"cuda": 11080}, "problem", "CUDA 11.8, driver 580.159.04: 12.0 is needed", "525 or newer"),
    ("driver", {}, "ok", "CUDA 13.0, driver 580.159.04", ""),
    ("GPU", {}, "ok", f"cuda:0: NVIDIA H100 80GB HBM3 at {PCI}", ""),
    ("GPU", {"machine": replace(H100, gpu="", pci="")}, "ok", "cuda:0: a GPU without a name", ""),
    (
        "GPU",
        {"machine": None, "missing": {"machine": "there is no CUDA device 7; 1 are visible"}},
        "problem",
        "there is no CUDA device 7; 1 are visible",
        "CUDA_VISIBLE_DEVICES",
    ),
    ("batch copies", {"cuda": 12060, "batch": False}, "warning", "before CUDA 12.8", "570 or newer"),
    ("batch copies", {"batch": False}, "warning", "no entry point", "Policy(path='staged')"),
    ("link", {}, "ok", "PCIe generation 5 x16, all that GPU and slot can", ""),
    ("link", linked(1, 16, 5, 16), "ok", "generation 1 x16 now, at most generation 5 x16; an idle GPU lowers it", ""),
    (
        "link",
        linked(1, 16, 5, 16) | {"missing": {"busy": "cuMemAlloc returned 2"}},
        "ok",
        "nothing was copied (cuMemAlloc returned 2)",
        "",
    ),
    ("link", linked(3, 16, 5, 16) | {"busy": True}, "problem", "generation 3 x16 now, at most", "BIOS slot setting"),
    ("link", linked(5, 8, 5, 16) | {"busy": True}, "problem", "5 x8 now", "x8 of x16 halves the ceiling"),
    ("link", linked(5, 4, 5, 16) | {"busy": True}, "problem", "5 x4 now", "reseat the card or check"),
    ("link", linked(5, 4, 5, 16) | {"busy": True}, "problem", "5 x4 now", "x4 of x16 leaves 4/16 of the ceiling"),
    ("link", linked(1, 8, 5, 16), "warning", "generation 1 x8 now", "reseat the card"),
    ("link", linked(5, 16, None, 16), "unknown", "at most generation ? x16: NVML and sysfs do not", "lspci -vv"),
    ("link", linked(), "unknown", "PCIe generation ? x? now", "lspci -vv"),
    (
        "link",
        linked() | {"missing": {"nvidia-ml-py": "not installed"}},
        "unknown",
        "PCIe generation ? x? now",
        "pip install nvidia-ml-py; or as root: lspci -vv",
    ),
    ("NUMA", {}, "ok", "the GPU is on node 1, this process may run on node 1 alone", ""),
    ("NUMA", {"nodes": (0,)} | placed(None), "ok", "the host is one node", ""),
    ("NUMA", placed(None), "unknown", "the node of the GPU is not known", "nvidia-smi topo -m"),
    ("NUMA", {"nodes": None, "cpu_nodes": None, "missing": {"nodes": "none"}}, "unknown", "process: none", ""),
    ("NUMA", {"memory_nodes": None}, "unknown", "this process: the kernel does not tell", ""),
    ("NUMA", {"cpu_nodes": (0,)}, "warning", "the GPU is on node 1, this process may run on node 0", BIND),
    ("NUMA", {"cpu_nodes": (0, 1)}, "warning", "this process may run on nodes 0, 1", BIND),
    ("NUMA", {"cpu_nodes": ()}, "warning", "may run on node", BIND),
    ("NUMA", {"memory_nodes": (0,)}, "warning", "may have memory of node 0 only", "docker run --cpuset-mems=1"),
    ("connections", {"connections": ""}, "ok", "is not set: 8 hardware queues", ""),
    ("connections", {"connections": "1"}, "warning", "=1: loads, stores and compute wait", "=32"),
    ("connections", {"connections": "many"}, "warning", "=many; expected a number from 1 to 32", "=32"),
    ("connections", {"connections": "0"}, "warning", "=0; expected a number", "=32"),
    ("connections", {"connections": "9" * 5000}, "warning", "expected a number from 1 to 32", "=32"),
    ("IOMMU", {"iommu": ""}, "ok", "none between GPU and memory", ""),
    ("IOMMU", {}, "ok", "identity: nothing is translated", ""),
    ("IOMMU", {"iommu": "DMA-FQ"}, "warning", "it translates (DMA-FQ)", "iommu=pt"),
    ("profile", {}, "ok", "calibrated: NVIDIA H100, PCIe 5 x16", ""),
    ("profile", {"profile": ProfileInUse("default", "", "")}, "warning", "default: measured nowhere", "kvplan cali"),
    ("profile", {"profile": ProfileInUse("shipped", "H100", "other driver")}, "warning", "shipped: other", "kvplan"),
    ("profile", {"profile": None, "missing": {"profile": "is no JSON"}}, "unknown", "is no JSON", ""),
    ("torch", {}, "ok", "2.11.0+cu130, built for CUDA 13.0", ""),
    ("torch", packaged(torch=None), "warning", "needed for streams", "pip install torch triton"),
    ("torch", {"torch_cuda": None}, "unknown", "2.11.0+cu130; for which CUDA? its version.py does not tell", ""),
    ("torch", {"torch_cuda": ""}, "problem", "built without CUDA", "pip install torch --index-url"),
    ("torch", {"torch_cuda": ""} | NO_DRIVER, "ok", "built without CUDA", ""),
    ("torch", {"cuda": 12080}, "problem", "built for CUDA 13.0; the driver serves 12.8", "a torch for CUDA 12"),
    ("torch", {"torch_cuda": "12.4"}, "ok", "built for CUDA 12.4", ""),
    ("torch", {"torch_cuda": "."}, "ok", "built for CUDA .", ""),
    ("torch", NO_DRIVER, "ok", "there is no driver for it", ""),
    ("Triton", packaged(triton=None), "problem", "not installed: no paths kernel and staged", '"triton>=3.3"'),
    ("Triton", packaged(triton=None) | NO_DRIVER, "warning", "not installed", '"triton>=3.3"'),
    ("Triton", packaged(triton="3.2.9"), "problem", "3.2.9; 3.3 is needed", '"triton>=3.3"'),
    ("Triton", packaged(triton="3.3.0+git1"), "ok", "3.3.0+git1", ""),
    ("Triton", packaged(triton="3.10"), "ok", "3.10", ""),
    ("Triton", packaged(triton="4.0.0"), "ok", "4.0.0", ""),
    ("Triton", packaged(triton=""), "unknown", "of unknown version", '"triton>=3.3"'),
    ("Triton", packaged(triton="nightly"), "unknown", "nightly; 3.3 is needed", '"triton>=3.3"'),
    ("numba", {}, "ok", "0.68.0, keeps loops in /home/me/.cache/numba", ""),
    ("numba", packaged(numba=None), "problem", "not installed; plans are made by loops", "numba>=0.60"),
    ("numba", {"numba_cache": ""}, "warning", "each process compiles them anew", "export NUMBA_CACHE_DIR="),
    ("numba", {"numba_cache": None, "missing": {"numba_cache": "no home"}}, "unknown", "no home", ""),
    ("locked memory", {}, "ok", "no limit", ""),
    ("locked memory", {"locked": 8 << 20}, "warning", "at most 8 MiB: CUDA pins more", "--ulimit memlock=-1"),
    ("locked memory", {"locked": 65536}, "warning", "at most 64 KiB", "ulimit -l unlimited"),
    ("locked memory", {"locked": None, "missing": {"locked": "no /proc"}}, "unknown", "no /proc", ""),
    ("host memory", {}, "ok", "400 GiB of 512 GiB available", ""),
    ("host memory", {"cgroup": None}, "ok", "400 GiB of 512 GiB available", ""),
    ("host memory", {"cgroup": (64 * GIB, 2 * GIB)}, "ok", "the cgroup may have 64 GiB and uses 2 GiB", ""),
    ("host memory", {"cgroup": (4 * GIB, 5 * GIB)}, "warning", "room for 0 bytes", "docker run --memory"),
    ("host memory", {"ram": (2 * GIB, GIB // 2)}, "warning", "room for 512 MiB", "pinned memory is never swapped"),
    ("host memory", {"ram": None}, "unknown", "the system does not tell", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "state", "what", "advice"), CASES)
def test_every_state_of_every_check(name, changed, state, what, advice):
    found = finding(name, replace(HEALTHY, **changed))
    assert (found.state, what in found.what, advice in found.advice) == (state, True, True), found
    assert (advice == "") == (found.advice == ""), found
    assert "\n" not in found.what + found.advice


@pytest.mark.parametrize(
    ("name", "changed"),
    [(name, NO_DRIVER) for name in ("GPU", "batch copies", "link", "NUMA", "connections")]
    + [(name.lower(), {name.lower(): None}) for name in ("profile",)]
    + [("IOMMU", {"iommu": None}), ("batch copies", {"batch": None})],
)
def test_a_check_with_nothing_to_look_at_is_left_out(name, changed):
    assert finding(name, replace(HEALTHY, **changed)) is None


def test_nothing_known_is_examined_all_the_same():
    assert {one.state for one in examine(Facts())} == {"problem", "warning", "unknown"}


def test_every_fact_is_described():
    assert not [one.name for one in fields(Facts) if f"        {one.name}: " not in Facts.__doc__]
