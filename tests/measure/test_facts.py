"""Facts for the doctor, gathered from trees, drivers and packages that are made up; nothing is raised."""

from __future__ import annotations

import errno
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

import kvplan.cost
import kvplan.measure
from kvplan.cost import store
from kvplan.cuda import device as cuda
from kvplan.cuda.machine import Link, Machine
from kvplan.errors import KVPlanError, TransferError
from kvplan.measure import facts as gathering
from kvplan.measure import host
from kvplan.measure.doctor import Finding, examine, gather
from kvplan.measure.facts import ProfileInUse
from tests.cuda.fake_system import PCI, libraries, sysfs, written
from tests.cuda.peer_topologies import Topology, all_pairs, linked

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
    "dev/shm/nothing": "",
    "sys/devices/system/node/online": "0-1\n",
    "sys/devices/system/node/node0/cpulist": "0-7\n",
    "sys/devices/system/node/node1/cpulist": "8-15\n",
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t8-11\nMems_allowed_list:\t0-1\n",
    "proc/self/numa_maps": "5500000000 default file=/bin/python N0=2\n5600000000 bind=static:1 heap anon=9 N1=9\n",
    "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu vme hypervisor lm\n",
    "sys/class/dmi/id/sys_vendor": "QEMU\n",
}


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    cuda.driver.cache_clear()
    yield libraries(monkeypatch)
    cuda.driver.cache_clear()


def test_facts_of_a_tree(fakes, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    fakes[0].gives["cuGetProcAddress_v2"] = [None, 0]  # success, and NULL
    found = gather(root=written(tmp_path, TREE))
    assert (found.cuda, found.batch, found.busy, found.connections) == (12080, False, False, "16")
    assert found.machine == Machine("NVIDIA H100 80GB HBM3", "580.159.04", Link(1, 16, 5, 16), 12080, PCI, 1)
    assert (found.locked, found.ram, found.cgroup) == (8 << 20, (GIB, GIB // 2), (64 * GIB, 4 * GIB))
    assert found.shared[0] >= found.shared[1] >= 0
    assert (found.nodes, found.cpu_nodes, found.memory_nodes, found.policy) == ((0, 1), (1,), (0, 1), "bind:1")
    assert (found.iommu, found.hypervisor, found.pool) == ("DMA-FQ", "QEMU", None)
    assert set(found.missing) <= {"torch", "triton", "numba", "cuda-bindings", "torch_cuda", "profile"}
    assert found.packages["numba"] == metadata.version("numba")


def test_facts_of_an_empty_tree(fakes, tmp_path):
    fakes[0].codes["cuInit"] = 100
    found = gather(root=tmp_path)
    assert "cuInit returned CUDA_ERROR_PLAYED" in found.missing["cuda"]
    assert found.missing["machine"] == found.missing["cuda"]
    assert {"locked", "ram", "cgroup", "shared", "nodes", "allowed", "policy", "hypervisor"} <= set(found.missing)
    assert finding("driver", found).state == "problem"


@pytest.mark.parametrize(("count", "peers"), [(1, None), (2, all_pairs(2, linked(18))), (8, all_pairs(8, linked(18)))])
def test_links_of_all_pairs_of_gpus(fakes, tmp_path, count, peers):
    Topology(count, {gpu: ["switch"] * 18 for gpu in range(count)}).play(*fakes)
    found = gather(root=tmp_path)
    assert found.peers == peers
    assert "peers" not in found.missing


def test_links_that_cannot_be_gathered(fakes, tmp_path):
    fakes[0].codes["cuDeviceGetCount"] = 999
    found = gather(root=tmp_path)
    assert found.peers is None
    assert finding("peers", found).what == "cuDeviceGetCount returned CUDA_ERROR_PLAYED (999, it was played)"


@pytest.mark.parametrize("device", ["cpu", "cuda:x", "", "cuda:-1", "cuda:\u0663"])
def test_a_device_that_is_none(fakes, tmp_path, device):
    found = gather(device, root=tmp_path)
    assert found.machine is None
    assert finding("GPU", found).what == f"{device!r} names no GPU; give a name such as 'cuda:0'"


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
    found = gather(root=tmp_path, pool=(1 << 40, 1 << 20))
    assert found.ram is found.cgroup is found.locked is found.policy is found.cpu_nodes is None
    assert {"ram", "cgroup", "locked", "policy"} <= set(found.missing)
    assert all(isinstance(one, Finding) for one in examine(found))
    assert all(found.missing.values())


def test_permission_denied_is_a_reason(fakes, monkeypatch, tmp_path):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(host, "text", denied)
    found = gather(root=written(tmp_path, TREE))
    assert found.missing["ram"] == "[Errno 13] Permission denied"
    assert finding("host memory", found) == Finding("host memory", "unknown", "[Errno 13] Permission denied")


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 0.06
        return self.now


def test_a_busy_link_is_read_while_copies_are_under_way(fakes, monkeypatch, tmp_path):
    entries, nvml = fakes
    entries.gives |= {
        "cuStreamCreateWithPriority": [0x51], "cuEventCreate": [0xE1],
        "cuMemAlloc_v2": [0xA0], "cuMemHostAlloc": [0xB0],
    }  # fmt: skip
    seen = []
    real = gathering.machine

    def machine(ordinal, **more):
        seen.append(len(entries.named("cuMemcpyAsync")))
        if seen[-1]:
            nvml.gives["nvmlDeviceGetCurrPcieLinkGeneration"] = [5]
        return real(ordinal, **more)

    monkeypatch.setattr(gathering, "machine", machine)
    monkeypatch.setattr(gathering, "time", Clock())
    found = gather("cuda:1", busy=True, root=tmp_path)
    assert (found.busy, found.machine.link) == (True, Link(5, 16, 5, 16))
    assert seen == [0, 3 + 8]
    assert set(entries.named("cuMemcpyAsync")) == {(0xA0, 0xB0, 64 << 20, 0x51)}
    assert len(entries.named("cuEventSynchronize")) == 3 + 1
    for call, given in (
        ("cuMemFree_v2", 0xA0), ("cuMemFreeHost", 0xB0), ("cuStreamDestroy_v2", 0x51), ("cuEventDestroy_v2", 0xE1),
    ):  # fmt: skip
        assert entries.named(call) == [(given,)]
    order = [name for name, _ in entries.calls]
    assert order.index("cuMemFree_v2") > order.index("cuEventDestroy_v2")  # nothing is under way any more


def test_a_link_that_is_awake_is_left_alone(fakes, tmp_path):
    fakes[1].gives["nvmlDeviceGetCurrPcieLinkGeneration"] = [5]
    assert not gather(busy=True, root=tmp_path).busy
    assert not fakes[0].named("cuDevicePrimaryCtxRetain")


def test_a_link_that_cannot_be_woken_is_told_as_idle(fakes, tmp_path):
    entries, _ = fakes
    entries.gives |= {"cuStreamCreateWithPriority": [0x51], "cuEventCreate": [0xE1]}
    entries.codes["cuMemAlloc_v2"] = 2
    found = gather(busy=True, root=tmp_path)
    assert (found.busy, found.machine.link.generation) == (False, 1)
    assert "cuMemAlloc returned" in found.missing["busy"]
    assert entries.named("cuStreamDestroy_v2") == [(0x51,)]
    assert not entries.named("cuMemFree_v2")


def test_torch_is_asked_without_importing_it(monkeypatch, tmp_path):
    written(
        tmp_path, {"torch/__init__.py": "raise RuntimeError", "torch/version.py": "", "cuda/bindings/__init__.py": ""}
    )
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


def test_packages_that_are_not_there(monkeypatch, tmp_path):
    def not_found(name):
        raise metadata.PackageNotFoundError(name)

    specs = {"torch": None, "triton": object(), "numba": object()}
    monkeypatch.setattr(gathering, "find_spec", lambda name: specs[name])  # KeyError of cuda.bindings
    monkeypatch.setattr(gathering.metadata, "version", not_found)
    found = gather(root=tmp_path)
    assert found.packages == {"triton": "", "numba": ""}
    assert found.missing["torch"] == "not installed"
    assert found.torch_cuda is None
    assert finding("torch", found).what.startswith("not installed;")


def test_folders_that_numba_may_write(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "loops" / "here"))
    assert gather().numba_cache == str(tmp_path / "loops" / "here")
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    writable = []
    monkeypatch.setattr(gathering.os, "access", lambda path, mode: any(path == one for one in writable))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert gather().numba_cache == ""
    writable.append(tmp_path)
    assert gather().numba_cache == str(tmp_path / "numba")


def test_the_profile_in_use(fakes, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = SimpleNamespace(gpu="H100", driver="580", link="PCIe 5 x16", how="calibrated", made="kvplan 1", note="")
    monkeypatch.setattr(store, "find", lambda gpu: kept)
    assert gather(root=tmp_path).profile == ProfileInUse("calibrated", "H100, driver 580, PCIe 5 x16 (kvplan 1)", "")

    def broken(gpu):
        raise KVPlanError("it is no profile")

    monkeypatch.setattr(store, "find", broken)
    found = gather(root=tmp_path)
    assert (found.profile, found.missing["profile"]) == (None, "it is no profile")
    monkeypatch.setitem(sys.modules, "kvplan.cost.store", None)
    monkeypatch.delattr(kvplan.cost, "store")
    found = gather(root=tmp_path)
    assert (found.profile, "profile" in found.missing) == (None, False)


def test_a_gpu_without_a_profile_has_the_default(fakes, monkeypatch, tmp_path):
    monkeypatch.delenv("KVPLAN_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fakes[0].gives["cuDeviceGetName"] = [b"a GPU that nobody measured"]
    found = gather(root=tmp_path)
    assert found.profile.how == "default"
    assert finding("profile", found).state == "warning"


def test_no_driver_is_a_reason(monkeypatch):
    def none():
        raise TransferError("there is no CUDA driver: no such file")

    monkeypatch.setattr(gathering, "driver", none)
    found = gather()
    assert (found.cuda, found.batch, found.machine, found.peers) == (None, None, None, None)
    assert "peers" not in found.missing
    assert finding("driver", found).what == "no CUDA driver: only the host path works"
