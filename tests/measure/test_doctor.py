"""The doctor: every check in every state, of facts written down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.cuda.machine import Link
from kvplan.measure.doctor import CHECKS, Facts, examine
from kvplan.measure.facts import ProfileInUse
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
    ("driver", {"cuda": 11080}, "problem", "CUDA 11.8, driver 580.159.04: 12.0 is needed", "525 or newer"),
    (
        "GPU",
        {"machine": None, "missing": {"machine": "there is no CUDA device 7; 1 are visible"}},
        "problem",
        "there is no CUDA device 7; 1 are visible",
        "CUDA_VISIBLE_DEVICES",
    ),
    ("batch copies", {"batch": False}, "warning", "no entry point", "Policy(path='staged')"),
    ("link", linked(1, 16, 5, 16), "ok", "generation 1 x16 now, at most generation 5 x16; an idle GPU lowers it", ""),
    ("link", linked(5, 8, 5, 16) | {"busy": True}, "problem", "5 x8 now", "x8 of x16 halves the ceiling"),
    ("link", linked(5, 4, 5, 16) | {"busy": True}, "problem", "5 x4 now", "x4 of x16 leaves 4/16 of the ceiling"),
    ("link", linked(1, 8, 5, 16), "warning", "generation 1 x8 now", "reseat the card"),
    ("link", linked(), "unknown", "PCIe generation ? x? now", "lspci -vv"),
    ("NUMA", placed(None), "unknown", "the node of the GPU is not known", "nvidia-smi topo -m"),
    ("NUMA", {"cpu_nodes": (0,)}, "warning", "the GPU is on node 1, this process may run on node 0", BIND),
    ("NUMA", {"memory_nodes": (0,)}, "warning", "may have memory of node 0 only", "docker run --cpuset-mems=1"),
    ("connections", {"connections": ""}, "ok", "is not set: 8 hardware queues", ""),
    ("connections", {"connections": "1"}, "warning", "=1: loads, stores and compute wait", "=32"),
    ("IOMMU", {"iommu": ""}, "ok", "none between GPU and memory", ""),
    ("IOMMU", {"iommu": "DMA-FQ"}, "warning", "it translates (DMA-FQ)", "iommu=pt"),
    ("profile", {"profile": ProfileInUse("default", "", "")}, "warning", "default: measured nowhere", "kvplan cali"),
    ("profile", {"profile": ProfileInUse("shipped", "H100", "other driver")}, "warning", "shipped: other", "kvplan"),
    ("torch", packaged(torch=None), "warning", "needed for streams", "pip install torch triton"),
    ("torch", {"torch_cuda": ""}, "problem", "built without CUDA", "pip install torch --index-url"),
    ("torch", {"cuda": 12080}, "problem", "built for CUDA 13.0; the driver serves 12.8", "a torch for CUDA 12"),
    ("torch", {"torch_cuda": "12.4"}, "ok", "built for CUDA 12.4", ""),
    ("Triton", packaged(triton=None), "problem", "not installed: no paths kernel and staged", '"triton>=3.3"'),
    ("Triton", packaged(triton="3.2.9"), "problem", "3.2.9; 3.3 is needed", '"triton>=3.3"'),
    ("Triton", packaged(triton="3.3.0+git1"), "ok", "3.3.0+git1", ""),
    ("numba", packaged(numba=None), "problem", "not installed; plans are made by loops", "numba>=0.60"),
    ("numba", {"numba_cache": ""}, "warning", "each process compiles them anew", "export NUMBA_CACHE_DIR="),
    ("locked memory", {"locked": 8 << 20}, "warning", "at most 8 MiB: CUDA pins more", "--ulimit memlock=-1"),
    ("host memory", {"cgroup": (4 * GIB, 5 * GIB)}, "warning", "room for 0 bytes", "docker run --memory"),
    ("host memory", {"ram": (2 * GIB, GIB // 2)}, "warning", "room for 512 MiB", "pinned memory is never swapped"),
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
