"""What a GPU and its link are, of a driver, an NVML and a file system that are none."""

from __future__ import annotations

import ctypes

import pytest

import kvplan
from kvplan.cuda import driver as cuda
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


@pytest.mark.parametrize(
    ("link", "key"),
    [
        (Link(1, 16, 5, 16), (5, 16)),
        (Link(5, 16, 5, 16), (5, 16)),
        (Link(4, 8, None, 16), (4, 8)),
        (Link(), (None, None)),
    ],
)
def test_the_key_is_the_same_whether_the_gpu_idles(link, key):
    assert link.key == key


def test_without_nvml_the_file_system_tells(fakes, monkeypatch, tmp_path):
    without_nvml(monkeypatch)
    written(tmp_path, sysfs() | {"proc/driver/nvidia/version": PROC})
    link = Link(generation=4, width=8, most_generation=5, most_width=16)
    assert machine(root=tmp_path) == Machine("NVIDIA H100 80GB HBM3", "570.86.15", link, 12080, PCI, 1)


def test_without_both_nobody_tells(fakes, monkeypatch, tmp_path):
    without_nvml(monkeypatch)
    assert machine(root=tmp_path) == Machine("NVIDIA H100 80GB HBM3", "", Link(), 12080, PCI, None)


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetHandleByPciBusId", "nvmlSystemGetDriverVersion"])
def test_what_nvml_refuses_the_file_system_tells(fakes, tmp_path, refused):
    fakes[1].refuses.add(refused)
    found = machine(root=written(tmp_path, sysfs() | {"proc/driver/nvidia/version": PROC}))
    assert found.driver == ("580.159.04" if "Handle" in refused else "570.86.15")
    assert found.link == (Link(1, 16, 5, 16) if "Version" in refused else Link(4, 8, 5, 16))


@pytest.mark.parametrize(
    ("text", "generation"),
    [
        ("2.5 GT/s PCIe", 1), ("5.0 GT/s PCIe", 2), ("8.0 GT/s PCIe", 3), ("16.0 GT/s PCIe", 4), ("32.0 GT/s PCIe", 5),
        ("64.0 GT/s PCIe", 6), ("128.0 GT/s", 7), ("8 GT/s", 3), ("Unknown", None), ("", None),
        ("9.9 GT/s", None), (b"\xff\x00 GT/s", None),
    ],
)  # fmt: skip
def test_speeds(fakes, monkeypatch, tmp_path, text, generation):
    without_nvml(monkeypatch)
    assert machine(root=written(tmp_path, sysfs(current_link_speed=text))).link.generation == generation


@pytest.mark.parametrize(
    ("text", "width"), [("16", 16), ("1\n", 1), ("0", None), ("255", None), ("", None), ("x16", None), ("9" * 99, None)]
)
def test_widths(fakes, monkeypatch, tmp_path, text, width):
    without_nvml(monkeypatch)
    assert machine(root=written(tmp_path, sysfs(max_link_width=text))).link.most_width == width


@pytest.mark.parametrize(("text", "node"), [("0\n", 0), ("3", 3), ("-1\n", None), ("", None), ("near", None)])
def test_nodes(fakes, tmp_path, text, node):
    assert machine(root=written(tmp_path, sysfs(numa_node=text))).numa_node == node


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (PROC, "570.86.15"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep 1\n", "580.159.04"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue Sep 1\n", "535.54"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04", "580.159.04"),
        ("GCC version: gcc 12.3.0 \n", ""),
        ("", ""),
        (b"\xff\xfe", ""),
    ],
)
def test_versions(fakes, monkeypatch, tmp_path, text, version):
    without_nvml(monkeypatch)
    assert machine(root=written(tmp_path, {"proc/driver/nvidia/version": text})).driver == version


def test_what_cannot_be_read_is_not_told(fakes, monkeypatch, tmp_path):
    without_nvml(monkeypatch)
    for name in sysfs():
        (tmp_path / name).mkdir(parents=True)  # reading a folder fails for every user, root too
    assert machine(root=tmp_path).link == Link()


def test_a_gpu_without_a_bus_id_has_no_place(fakes, tmp_path):
    fakes[0].codes["cuDeviceGetPCIBusId"] = 1
    found = machine(root=written(tmp_path, sysfs() | {"sys/bus/pci/devices/numa_node": "1"}))
    assert (found.pci, found.link, found.numa_node, found.driver) == ("", Link(), None, "580.159.04")


@pytest.mark.parametrize("ordinal", [2, -1])
def test_a_device_that_is_not_there(fakes, ordinal):
    with pytest.raises(kvplan.TransferError, match=f"there is no CUDA device {ordinal}; 2 are visible"):
        machine(ordinal)


@pytest.mark.parametrize("call", ["cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName"])
def test_a_driver_that_refuses(fakes, call):
    fakes[0].codes[call] = 719
    with pytest.raises(kvplan.TransferError, match=f"{call} returned CUDA_ERROR_PLAYED"):
        machine()


def test_no_driver(monkeypatch):
    def load(path):
        raise OSError(f"{path}: no such file")

    cuda.loaded.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(kvplan.TransferError, match="there is no CUDA driver"):
        machine()
