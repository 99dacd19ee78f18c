"""Files under /sys, a CUDA driver and NVML of a machine, written by hand."""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

from tests.simulated.entries import Entries

PCI = "0000:0f:00.0"


class NVMLError(Exception):
    """What nvidia-ml-py raises."""


class Nvml:
    """The functions of nvidia-ml-py that kvplan calls; a GPU's handle is its bus.

    Attributes:
        gives: what a function returns, by its name; or a function of its arguments that returns it.
        refuses: names of functions that raise an error.
        calls: names of the functions called.
    """

    NVMLError = NVMLError
    __spec__ = ModuleSpec("pynvml", None)

    def __init__(self) -> None:
        self.gives = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": "580.159.04",
            "nvmlDeviceGetHandleByPciBusId": lambda pci: int(pci.split(":")[1], 16) if pci else None,
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(domain=0, bus=gpu, device=0),
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
        }
        self.refuses = set()
        self.calls = []

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            assert None not in arguments, f"{name} crashes on a handle that NVML did not give"
            if name not in self.gives or {name, "nvmlInit"} & self.refuses:
                raise NVMLError(name)
            gives = self.gives[name]
            return gives(*arguments) if callable(gives) else gives

        return call


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
    entries, nvml = Entries(), Nvml()
    entries.gives |= {"cuDeviceGetName": [b"NVIDIA H100 80GB HBM3"], "cuDeviceGetPCIBusId": [b"0000:0F:00.0"]}
    real = ctypes.CDLL
    for kind in ("CDLL", "PyDLL"):
        monkeypatch.setattr(
            ctypes, kind, lambda path, **more: entries if path == "libcuda.so.1" else real(path, **more)
        )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return entries, nvml


def without_nvml(monkeypatch):
    """Let nvidia-ml-py be missing."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
