"""The doctor: every check in every state, of facts written down; and facts of trees, drivers and packages made up."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata

import pytest

from kvplan.cuda import driver as cuda
from kvplan.cuda.machine import Link, Machine
from kvplan.measure.doctor import Facts, Finding, ProfileInUse, examine, gather
from tests.cuda.fake_system import PCI, libraries, sysfs, written
from tests.cuda.peer_topologies import all_pairs, linked, reached, refused
from tests.measure.doctor_facts import GIB, H100, HEALTHY


def finding(name, facts):
    return {one.name: one for one in examine(facts)}.get(name)


def test_a_healthy_machine():
    found = examine(HEALTHY)
    assert {(one.state, one.advice) for one in found} == {("ok", "")}
    assert [one.name for one in found] == [
        "driver", "GPU", "batch copies", "link", "NUMA", "connections", "IOMMU", "profile", "torch", "Triton",
        "numba", "locked memory", "host memory",
    ]  # fmt: skip


def link(*numbers):
    return {"machine": replace(H100, link=Link(*numbers))}


def packaged(name, version=None):
    others = {package: one for package, one in HEALTHY.packages.items() if package != name}
    return {"packages": others if version is None else others | {name: version}}


def islands(gpu, peer):
    """NVLink within pairs of GPUs, PCIe across."""
    return reached(gpu, peer, 4 if gpu // 2 == peer // 2 else 0)


def without_1(gpu, peer):
    return refused(gpu, peer, "MIG", 0) if 1 in (gpu, peer) else reached(gpu, peer, 18)


NO_DRIVER = {"cuda": None, "batch": None, "machine": None}
EVERY = "from every GPU to every other: by"
CASES = [
    ("driver", NO_DRIVER, "problem", "no CUDA driver: only the host path works", "docker run --gpus all"),
    ("driver", {"cuda": 11080}, "problem", "CUDA 11.8, driver 580.159.04: 12.0 is needed", "525 or newer"),
    ("GPU", {"machine": None, "missing": {"machine": "no device 7"}}, "problem", "no device 7", "VISIBLE_DEVICES"),
    ("batch copies", {"batch": False}, "warning", "no cuMemcpyBatchAsync", "Policy(path='staged')"),
    ("link", link(1, 16, 5, 16), "ok", "generation 1 x16 now, at most generation 5 x16; an idle GPU lowers it", ""),
    ("link", link(5, 8, 5, 16) | {"busy": True}, "problem", "5 x8 now", "x8 of x16 halves the ceiling"),
    ("link", link(5, 4, 5, 16) | {"busy": True}, "problem", "5 x4 now", "x4 of x16 leaves 4/16 of the ceiling"),
    ("link", link(4, 16, 5, 16) | {"busy": True}, "problem", "4 x16 now, at most generation 5 x16, under", "risers"),
    ("link", link(1, 8, 5, 16), "warning", "generation 1 x8 now", "reseat the card"),
    ("link", link(), "unknown", "PCIe generation ? x? now", "lspci -vv"),
    ("peers", {"peers": all_pairs(2, linked(18))}, "ok", f"{EVERY} NVLink, 18 links", ""),
    ("peers", {"peers": all_pairs(4, islands)}, "ok", "cuda:0 to 1, 1 to 0, 2 to 3, 3 to 2: by NVLink, 4 links; cuda:0",
     ""),
    ("peers", {"peers": all_pairs(3, without_1)}, "warning", "2 to 1: no access (MIG)", "topo -p2p r"),
    ("peers", {"peers": all_pairs(2, linked(0)), "iommu": "DMA-FQ"}, "warning", f"{EVERY} PCIe; over", "iommu=pt"),
    ("peers", {"peers": all_pairs(2, linked(None))}, "unknown", "NVML does not tell", "NVIDIA_DRIVER_CAPABILITIES"),
    ("NUMA", {"machine": replace(H100, numa_node=None)}, "unknown", "node of the GPU", "nvidia-smi topo -m"),
    ("NUMA", {"cpu_nodes": (0,)}, "warning", "the GPU is on node 1, this process may run on node 0",
     "numactl --cpunodebind=1 --membind=1"),
    ("NUMA", {"memory_nodes": (0,)}, "warning", "may have memory of node 0 only", "docker run --cpuset-mems=1"),
    ("connections", {"connections": ""}, "ok", "is not set: 8 hardware queues", ""),
    ("connections", {"connections": "1"}, "warning", "=1: loads, stores and compute wait", "=32"),
    ("IOMMU", {"iommu": ""}, "ok", "none between GPU and memory", ""),
    ("IOMMU", {"iommu": "DMA-FQ"}, "warning", "it translates (DMA-FQ)", "iommu=pt"),
    ("IOMMU", {"iommu": None, "missing": {"iommu": "no sysfs"}}, "unknown", "no sysfs", ""),
    ("profile", {"profile": ProfileInUse("default", "", "")}, "warning", "default: measured nowhere", "kvplan cali"),
    ("profile", {"profile": ProfileInUse("shipped", "H100", "other driver")}, "warning", "shipped: other", "kvplan"),
    ("torch", packaged("torch"), "warning", "not installed; needed for streams", "pip install torch triton"),
    ("torch", {"torch_cuda": ""}, "problem", "built without CUDA", "pip install torch --index-url"),
    ("torch", {"cuda": 12080}, "problem", "built for CUDA 13.0; the driver serves 12.8", "a torch for CUDA 12"),
    ("torch", {"torch_cuda": None}, "unknown", "for which CUDA?", "pip install torch"),
    ("Triton", packaged("triton"), "problem", "not installed; 3.3 is needed by the paths kernel", '"triton>=3.3"'),
    ("Triton", packaged("triton", "3.2.9"), "problem", "3.2.9; 3.3 is needed", '"triton>=3.3"'),
    ("Triton", packaged("triton", "3.3.0+git1"), "ok", "3.3.0+git1", ""),
    ("numba", packaged("numba"), "problem", "not installed; plans are made by loops", "pip install numba"),
    ("numba", {"numba_cache": ""}, "warning", "each process compiles them anew", "export NUMBA_CACHE_DIR="),
    ("locked memory", {"locked": 8 << 20}, "warning", "at most 8 MiB: CUDA pins more", "--ulimit memlock=-1"),
    ("host memory", {"cgroup": (4 * GIB, 5 * GIB)}, "warning", "room for 0 bytes", "docker run --memory"),
    ("host memory", {"ram": (2 * GIB, GIB // 2)}, "warning", "room for 512 MiB, and pinned memory", "pool smaller"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "state", "what", "advice"), CASES)
def test_every_state_of_every_check(name, changed, state, what, advice):
    found = finding(name, replace(HEALTHY, **changed))
    assert (found.state, what in found.what, advice in found.advice) == (state, True, True), found
    assert (advice == "") == (found.advice == ""), found
    assert "\n" not in found.what + found.advice


def test_a_check_with_nothing_to_look_at_is_left_out():
    assert [one.name for one in examine(Facts())] == ["driver", "torch", "Triton", "numba"]
    assert (
        finding("IOMMU", replace(HEALTHY, iommu=None)) is finding("batch copies", replace(HEALTHY, batch=None)) is None
    )


TREE = sysfs() | {
    f"sys/bus/pci/devices/{PCI}/iommu_group/type": "DMA-FQ\n",
    "proc/self/cgroup": "0::/pod/one\n",
    "sys/fs/cgroup/pod/memory.max": "68719476736\n",
    "sys/fs/cgroup/pod/memory.current": "4294967296\n",
    "sys/fs/cgroup/pod/one/memory.max": "max\n",
    "sys/fs/cgroup/pod/one/memory.current": "1073741824\n",
    "proc/meminfo": "MemTotal:       1048576 kB\nMemFree:  1 kB\nMemAvailable:    524288 kB\nHugePages_Total:  0\n",
    "sys/devices/system/node/online": "0-1\n",
    "sys/devices/system/node/node0/cpulist": "0-7\n",
    "sys/devices/system/node/node1/cpulist": "8-11,15\n",
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t8-11\nMems_allowed_list:\t0-1\n",
}


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    cuda.loaded.cache_clear()
    yield libraries(monkeypatch)
    cuda.loaded.cache_clear()


def test_facts_of_a_tree(fakes, tmp_path):
    fakes[0].gives["cuGetProcAddress_v2"] = [None, 0]  # success, and NULL
    found = gather(root=written(tmp_path, TREE))
    assert (found.cuda, found.batch, found.busy, found.connections) == (12080, False, False, "16")
    assert found.machine == Machine("NVIDIA H100 80GB HBM3", "580.159.04", Link(1, 16, 5, 16), 12080, PCI, 1)
    assert (found.ram, found.cgroup) == ((GIB, GIB // 2), (64 * GIB, 4 * GIB))
    assert (found.nodes, found.cpu_nodes, found.memory_nodes) == ((0, 1), (1,), (0, 1))
    assert found.iommu == "DMA-FQ"
    assert set(found.missing) <= {"torch", "triton", "numba", "nvidia-ml-py", "torch_cuda", "profile"}
    assert found.packages["numba"] == metadata.version("numba")


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\x00\xfe" * 9, b"-\n:\n::\n" * 9, None])
def test_malformed_files_are_missing_facts(fakes, tmp_path, content):
    fakes[0].codes["cuInit"] = 100
    for name in TREE:
        if content is None:  # reading it fails, for root too
            (tmp_path / name).mkdir(parents=True)
        else:
            written(tmp_path, {name: content})
    found = gather(root=tmp_path)
    assert found.machine is found.ram is found.cgroup is found.cpu_nodes is None
    assert {"cuda", "ram", "cgroup", "nodes"} <= set(found.missing)
    assert all(isinstance(one, Finding) for one in examine(found))
    assert "cuInit returned CUDA_ERROR_PLAYED" in finding("driver", found).what


def test_torch_is_asked_without_importing_it(monkeypatch, tmp_path):
    written(tmp_path, {"torch/__init__.py": "raise RuntimeError", "torch/version.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for text, expected in (
        ("cuda: Optional[str] = '12.8'\n", "12.8"), ('cuda = "13.0"\n', "13.0"), ("cuda: Optional[str] = None\n", ""),
        ("cuda_version = '9'\n", None),
    ):  # fmt: skip
        (tmp_path / "torch" / "version.py").write_text(text)
        found = gather(root=tmp_path)
        assert found.torch_cuda == expected
        assert (expected is None) == ("torch_cuda" in found.missing)
    assert "torch" not in sys.modules
