"""Facts for the doctor, gathered from trees, drivers and packages that are made up; nothing is raised."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from kvplan.cuda import driver as cuda
from kvplan.cuda.machine import Link, Machine
from kvplan.measure.doctor import Finding, examine, gather
from tests.cuda.fake_system import PCI, libraries, sysfs, written

GIB = 1 << 30


def finding(name, facts):
    return {one.name: one for one in examine(facts)}.get(name)


TREE = sysfs() | {
    f"sys/bus/pci/devices/{PCI}/iommu_group/type": "DMA-FQ\n",
    "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max locked memory         8388608              8388608              bytes     \n",
    "proc/self/cgroup": "0::/pod/one\n",
    "sys/fs/cgroup/pod/memory.max": "68719476736\n",
    "sys/fs/cgroup/pod/memory.current": "4294967296\n",
    "sys/fs/cgroup/pod/one/memory.max": "max\n",
    "sys/fs/cgroup/pod/one/memory.current": "1073741824\n",
    "proc/meminfo": "MemTotal:       1048576 kB\nMemFree:  1 kB\nMemAvailable:    524288 kB\nHugePages_Total:  0\n",
    "sys/devices/system/node/online": "0-1\n",
    "sys/devices/system/node/node0/cpulist": "0-7\n",
    "sys/devices/system/node/node1/cpulist": "8-15\n",
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t8-11\nMems_allowed_list:\t0-1\n",
}


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    cuda.loaded.cache_clear()
    yield libraries(monkeypatch)
    cuda.loaded.cache_clear()


def test_facts_of_a_tree(fakes, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    fakes[0].gives["cuGetProcAddress_v2"] = [None, 0]  # success, and NULL
    found = gather(root=written(tmp_path, TREE))
    assert (found.cuda, found.batch, found.busy, found.connections) == (12080, False, False, "16")
    assert found.machine == Machine("NVIDIA H100 80GB HBM3", "580.159.04", Link(1, 16, 5, 16), 12080, PCI, 1)
    assert (found.locked, found.ram, found.cgroup) == (8 << 20, (GIB, GIB // 2), (64 * GIB, 4 * GIB))
    assert (found.nodes, found.cpu_nodes, found.memory_nodes) == ((0, 1), (1,), (0, 1))
    assert found.iommu == "DMA-FQ"
    assert set(found.missing) <= {"torch", "triton", "numba", "nvidia-ml-py", "torch_cuda", "profile"}
    assert found.packages["numba"] == metadata.version("numba")


def test_facts_of_an_empty_tree(fakes, tmp_path):
    fakes[0].codes["cuInit"] = 100
    found = gather(root=tmp_path)
    assert "cuInit returned CUDA_ERROR_PLAYED" in found.missing["cuda"]
    assert found.missing["machine"] == found.missing["cuda"]
    assert {"locked", "ram", "cgroup", "nodes", "allowed"} <= set(found.missing)
    assert finding("driver", found).state == "problem"


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\xff\x00\xfe" * 9, b"0-999999999999999\n", b"-\n:\n::\n" * 9, None]
)
def test_malformed_files_are_missing_facts(fakes, tmp_path, content):
    for name in TREE:
        path = tmp_path / name
        if content is None:  # reading it fails, for root too
            path.mkdir(parents=True)
        else:
            written(tmp_path, {name: content})
    found = gather(root=tmp_path)
    assert found.ram is found.cgroup is found.locked is found.cpu_nodes is None
    assert {"ram", "cgroup", "locked"} <= set(found.missing)
    assert all(isinstance(one, Finding) for one in examine(found))
    assert all(found.missing.values())


def test_torch_is_asked_without_importing_it(monkeypatch, tmp_path):
    written(tmp_path, {"torch/__init__.py": "raise RuntimeError", "torch/version.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for text, expected in (
        ("cuda: Optional[str] = '12.8'\n", "12.8"), ('cuda = "13.0"\n', "13.0"), ("cuda: Optional[str] = None\n", ""),
        ("cuda_version = '9'\n", None), ("", None),
    ):  # fmt: skip
        (tmp_path / "torch" / "version.py").write_text(text)
        found = gather(root=tmp_path)
        assert found.torch_cuda == expected
        assert (expected is None) == ("torch_cuda" in found.missing)
    assert "torch" not in sys.modules
