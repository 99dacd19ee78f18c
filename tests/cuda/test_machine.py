"""What a GPU and its link are, of a driver, an NVML and a file system that are none."""

from __future__ import annotations

import pytest

from kvplan.cuda.machine import Link, Machine, machine
from tests.cuda.fake_system import PCI, sysfs, without_nvml, written

PROC = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.3.0\n"


def test_driver_and_nvml_tell(fakes, tmp_path):
    entries, nvml = fakes
    link = Link(generation=1, width=16, most_generation=5, most_width=16)
    assert machine(1, root=tmp_path) == Machine("NVIDIA H100 80GB HBM3", "580.159.04", link, 12080, PCI, None)
    assert {arguments[1] for arguments in entries.named("cuDeviceGet")} == {1}
    assert [arguments[1:] for arguments in entries.named("cuDeviceGetName")] == [(256, 1)]
    assert [arguments[1:] for arguments in entries.named("cuDeviceGetPCIBusId")] == [(32, 1)]
    assert nvml.calls.count("nvmlInit") == nvml.calls.count("nvmlShutdown") == 1
    assert entries.named("cuDevicePrimaryCtxRetain") == []  # no context is made


def test_without_nvml_the_file_system_tells(fakes, monkeypatch, tmp_path):
    without_nvml(monkeypatch)
    written(tmp_path, sysfs() | {"proc/driver/nvidia/version": PROC})
    link = Link(generation=4, width=8, most_generation=5, most_width=16)
    assert machine(root=tmp_path) == Machine("NVIDIA H100 80GB HBM3", "570.86.15", link, 12080, PCI, 1)


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetHandleByPciBusId", "nvmlSystemGetDriverVersion"])
def test_what_nvml_refuses_the_file_system_tells(fakes, tmp_path, refused):
    fakes[1].refuses.add(refused)
    found = machine(root=written(tmp_path, sysfs() | {"proc/driver/nvidia/version": PROC}))
    assert found.driver == ("580.159.04" if "Handle" in refused else "570.86.15")
    assert found.link == (Link(1, 16, 5, 16) if "Version" in refused else Link(4, 8, 5, 16))
