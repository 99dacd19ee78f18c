"""What a host tells of its memory and nodes, of trees and a system call that are made up."""

from __future__ import annotations

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
