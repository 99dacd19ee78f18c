"""Files under /sys and libraries of a machine with one GPU, written by hand."""

from __future__ import annotations

import ctypes

from kvplan.cuda import device as cuda
from tests.simulated.entries import Entries

PCI = "0000:0f:00.0"


NVML = {
    "nvmlSystemGetDriverVersion": [b"580.159.04"],
    "nvmlDeviceGetHandleByPciBusId_v2": [0xAB],
    "nvmlDeviceGetCurrPcieLinkGeneration": [1],
    "nvmlDeviceGetCurrPcieLinkWidth": [16],
    "nvmlDeviceGetMaxPcieLinkGeneration": [5],
    "nvmlDeviceGetMaxPcieLinkWidth": [16],
}


SYSFS = {
    "current_link_speed": "16.0 GT/s PCIe\n",
    "current_link_width": "8\n",
    "max_link_speed": "32.0 GT/s PCIe\n",
    "max_link_width": "16\n",
    "numa_node": "1\n",
}


def written(root, files):
    """Write files, by their path under a root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def sysfs(**given):
    return {f"sys/bus/pci/devices/{PCI}/{name}": text for name, text in (SYSFS | given).items()}


def libraries(monkeypatch):
    """A CUDA driver and an NVML, in place of those of this machine."""
    entries, nvml = Entries(), Entries()
    entries.gives |= {"cuDeviceGetName": [b"NVIDIA H100 80GB HBM3"], "cuDeviceGetPCIBusId": [b"0000:0F:00.0"]}
    nvml.gives = dict(NVML)
    real = ctypes.CDLL
    ours = {"libcuda.so.1": entries, "libnvidia-ml.so.1": nvml}
    for kind in ("CDLL", "PyDLL"):
        monkeypatch.setattr(cuda.ctypes, kind, lambda path, **more: ours.get(path) or real(path, **more))
    return entries, nvml
