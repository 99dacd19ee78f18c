"""What a host tells of its memory and nodes, of trees and a system call that are made up."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvplan.measure import host
from tests.cuda.fake_system import PCI, sysfs, written


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "4:memory:/a\n0::/\n", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096",
          "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "96"}, (4096, 96)),
        ({"proc/self/cgroup": "4:cpu,memory:/host/path\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "96"}, (4096, 96)),
        ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "96"}, (-1, 96)),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "7"},
         (-1, 7)),
    ],
)  # fmt: skip
def test_cgroups_of_both_versions(tmp_path, files, expected):
    assert host.cgroup(written(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Max locked memory         unlimited            unlimited            bytes\n", -1),
     ("Max locked memory         65536                unlimited            bytes\n", 65536)],
)  # fmt: skip
def test_limits_of_locked_memory(tmp_path, text, expected):
    assert host.locked_limit(written(tmp_path, {"proc/self/limits": text})) == expected


@pytest.mark.parametrize(
    ("flags", "vendor", "expected"),
    [("fpu", "QEMU", ""), ("fpu hypervisor", "QEMU", "QEMU"), ("hypervisor", "", "of no name"),
     ("hypervisor", None, "of no name")],
)  # fmt: skip
def test_virtual_machines(tmp_path, flags, vendor, expected):
    files = {"proc/cpuinfo": f"flags : {flags}\n"} | ({} if vendor is None else {"sys/class/dmi/id/sys_vendor": vendor})
    assert host.hypervisor(written(tmp_path, files)) == expected


def test_an_iommu_that_is_not_there(tmp_path):
    assert host.iommu(written(tmp_path, sysfs()), PCI) == ""
    with pytest.raises(ValueError, match="is not in /sys/bus/pci/devices"):
        host.iommu(tmp_path, "")
    with pytest.raises(ValueError, match="has no type"):
        host.iommu(written(tmp_path, {f"sys/bus/pci/devices/{PCI}/iommu_group/type": ""}), PCI)


def test_hosts_without_nodes_or_heap(tmp_path):
    with pytest.raises(ValueError, match="names no node"):
        host.nodes(written(tmp_path, {"sys/devices/system/node/online": "0"}))
    with pytest.raises(ValueError, match="has no heap"):
        host.memory_policy(written(tmp_path, {"proc/self/numa_maps": "5500 default\n\n"}))


MAPS = "1000 default anon=4 N0=4\n7000 bind:1 anon=3 dirty=3 N0=1 N1=2\n9000 default N1=5\nff000 default N0=7\nz 1\n"


@pytest.mark.parametrize(
    ("address", "nbytes", "expected"),
    [(0x7000, 0x3000, {0: 1, 1: 7}), (0x8000, 0x100, {0: 1, 1: 2}), (0x1000, 0x100, {0: 4}), (0x10, 0x1000, {0: 4})],
)
def test_pages_by_the_map_of_the_process(monkeypatch, tmp_path, address, nbytes, expected):
    monkeypatch.setattr(host, "_MOVE_PAGES", {})
    root = written(tmp_path, {"proc/self/numa_maps": MAPS})
    if address == 0x10:  # before every mapping
        with pytest.raises(ValueError, match="tells of no page at 0x10"):
            host.pool_nodes(root, address, 0x10)
    else:
        assert host.pool_nodes(root, address, nbytes) == expected


def test_a_pool_of_nothing(tmp_path):
    with pytest.raises(ValueError, match="a pool of 0 bytes at 0x1000; expected an address and a size above 0"):
        host.pool_nodes(tmp_path, 0x1000, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
def test_pages_of_this_process():
    memory = mmap.mmap(-1, 128 * mmap.PAGESIZE)
    memory.write(b"x" * (64 * mmap.PAGESIZE))
    try:
        pages = host.pool_nodes(Path("/"), np.frombuffer(memory, np.uint8).ctypes.data, 64 * mmap.PAGESIZE)
    except (OSError, ValueError) as error:
        pytest.skip(f"a container without move_pages and numa_maps: {error}")
    assert sum(pages.values()) >= 1
    assert max(pages) >= 0


def move_pages(monkeypatch, nodes):
    asked = []

    def syscall(*arguments):
        asked.append(arguments)
        for k, node in enumerate(nodes or ()):
            arguments[5][k] = node
        return 0 if nodes else -1

    monkeypatch.setattr(host, "_MOVE_PAGES", {host.platform.machine(): 279})
    monkeypatch.setattr(host.ctypes, "CDLL", lambda path, **_: SimpleNamespace(syscall=syscall))
    return asked


def test_pages_by_the_system_call(monkeypatch, tmp_path):
    asked = move_pages(monkeypatch, [0, 1, 1, -2, -14])
    page = mmap.PAGESIZE
    assert host.pool_nodes(tmp_path, 8 * page + 5, 4 * page) == {-1: 2, 0: 1, 1: 2}
    ((number, process, count, pages, nodes, _, flags),) = asked
    assert [one.value or 0 for one in (number, process, count, nodes, flags)] == [279, 0, 5, 0, 0]
    assert list(pages) == [k * page for k in range(8, 13)]


def test_a_system_call_that_is_forbidden(monkeypatch, tmp_path):
    move_pages(monkeypatch, None)
    assert host.pool_nodes(written(tmp_path, {"proc/self/numa_maps": MAPS}), 0x9000, 4096) == {1: 5}
