"""Facts of a GPU and its link to the host. They are the key of a device profile, and ``kvplan doctor`` shows them."""

from __future__ import annotations

import re
from ctypes import POINTER, byref, c_uint, c_void_p, create_string_buffer
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplan.cuda.driver import SUCCESS, Driver, driver
from kvplan.cuda.nvml import handle_of, nvml

ROOT = Path("/")

# GT/s per lane, as sysfs writes it, of PCI Express generations 1, 2, ...
_SPEEDS = ("2.5", "5", "8", "16", "32", "64", "128")
_WIDTHS = frozenset(
    {1, 2, 4, 8, 12, 16, 32}
)  # numbers of lanes in PCI Express; sysfs gives 0 or 255 for an unknown number

_NVML: dict[str, tuple[Any, ...]] = {
    "nvmlSystemGetDriverVersion": (c_void_p, c_uint),
    "nvmlDeviceGetCurrPcieLinkGeneration": (c_void_p, POINTER(c_uint)),
    "nvmlDeviceGetCurrPcieLinkWidth": (c_void_p, POINTER(c_uint)),
    "nvmlDeviceGetMaxPcieLinkGeneration": (c_void_p, POINTER(c_uint)),
    "nvmlDeviceGetMaxPcieLinkWidth": (c_void_p, POINTER(c_uint)),
}


@dataclass(frozen=True, slots=True)
class Link:
    """The PCI Express link of a GPU; an unknown value is None.

    Attributes:
        generation: current generation; an idle GPU lowers it.
        width: current number of lanes.
        most_generation: highest generation of GPU and slot, from NVML; without NVML, of the GPU.
        most_width: largest number of lanes, from the same sources.
    """

    generation: int | None = None
    width: int | None = None
    most_generation: int | None = None
    most_width: int | None = None

    @property
    def key(self) -> tuple[int | None, int | None]:
        """Return the highest known generation, and the lanes: an idle GPU has the same key as a busy one.

        >>> Link(generation=1, width=16, most_generation=5, most_width=16).key
        (5, 16)
        >>> Link(generation=4, width=8).key
        (4, 8)
        """
        return self.most_generation or self.generation, self.width


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU, its driver, and its place in the machine.

    Attributes:
        gpu: name of the GPU, such as ``"NVIDIA H100 80GB HBM3"``.
        driver: version of the kernel driver, such as ``"580.159.04"``; ``""`` if it is not known.
        link: the GPU's link to the host.
        cuda: CUDA version of the driver, as CUDA writes it: 13000 is 13.0.
        pci: bus id in lower case, such as ``"0000:0f:00.0"``; ``""`` if the driver does not give it.
        numa_node: the NUMA node whose memory is next to the GPU, or None.
    """

    gpu: str
    driver: str
    link: Link
    cuda: int
    pci: str
    numa_node: int | None


def machine(ordinal: int = 0, *, root: Path = ROOT) -> Machine:
    """Return the facts of a GPU and its link, in milliseconds. Nothing is allocated or set on the GPU.

    Name and bus id come from the CUDA driver; version and link from NVML, otherwise from ``/proc`` and ``/sys``.

    Args:
        ordinal: number of the GPU among the visible ones.
        root: root of the file system with ``proc`` and ``sys``.

    Raises:
        TransferError: there is no driver, or no such device.

    >>> from kvplan.errors import TransferError
    >>> try:
    ...     generation, lanes = machine().link.key
    ... except TransferError:  # no GPU here
    ...     generation = lanes = None
    """
    cu = driver()
    handle = cu.handle(ordinal)
    code, gpu = _told(cu.cuDeviceGetName, 256, handle)
    cu.check("cuDeviceGetName", code)
    return _placed(cu, gpu, bus_id(cu, handle), root)


def bus_id(cu: Driver, handle: int) -> str:
    """Return the bus id of a GPU in lower case, such as ``"0000:0f:00.0"``; ``""`` if the driver does not give it."""
    code, pci = _told(cu.cuDeviceGetPCIBusId, 32, handle)
    return pci.lower() if code == SUCCESS else ""


def _placed(cu: Driver, gpu: str, pci: str, root: Path) -> Machine:
    version, told = _from_nvml(pci)
    found = _from_sysfs(root, pci)
    link = Link(
        told.generation or found.generation,
        told.width or found.width,
        told.most_generation or found.most_generation,
        told.most_width or found.most_width,
    )
    return Machine(gpu, version or _from_proc(root), link, cu.version, pci, _numa_node(root, pci))


def _told(entry: Any, room: int, handle: int) -> tuple[int, str]:
    """Call an entry point that describes a device in text; return its status and the text."""
    written = create_string_buffer(room)
    code = int(entry(byref(written), room, handle))
    return code, written.value.decode(errors="replace")


def _from_nvml(pci: str) -> tuple[str, Link]:
    """Return the driver's version and the link. They are empty if NVML is missing, too old, or returns an error."""
    with nvml(_NVML) as library:
        if library is None:
            return "", Link()
        written = create_string_buffer(80)
        code = library.nvmlSystemGetDriverVersion(byref(written), len(written))
        version = written.value.decode(errors="replace") if code == SUCCESS else ""
        handle = handle_of(library, pci)
        if handle is None:
            return version, Link()
        return version, Link(
            _generation(_number(library.nvmlDeviceGetCurrPcieLinkGeneration, handle)),
            _width(_number(library.nvmlDeviceGetCurrPcieLinkWidth, handle)),
            _generation(_number(library.nvmlDeviceGetMaxPcieLinkGeneration, handle)),
            _width(_number(library.nvmlDeviceGetMaxPcieLinkWidth, handle)),
        )


def _number(entry: Any, handle: c_void_p) -> int | None:
    value = c_uint()
    return value.value if entry(handle, byref(value)) == SUCCESS else None


def _generation(told: int | None) -> int | None:
    return told if told is not None and 1 <= told <= len(_SPEEDS) else None


def _width(told: int | None) -> int | None:
    return told if told in _WIDTHS else None


def _from_sysfs(root: Path, pci: str) -> Link:
    return Link(
        _speed(_attribute(root, pci, "current_link_speed")),
        _lanes(_attribute(root, pci, "current_link_width")),
        _speed(_attribute(root, pci, "max_link_speed")),
        _lanes(_attribute(root, pci, "max_link_width")),
    )


def _attribute(root: Path, pci: str, name: str) -> str:
    """Return the text of a file of a PCI device, or ``""``."""
    return _text(root / "sys/bus/pci/devices" / pci / name) if pci else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _speed(text: str) -> int | None:
    """Return the PCI Express generation of a lane's speed.

    >>> _speed("32.0 GT/s PCIe"), _speed("2.5 GT/s"), _speed("Unknown")
    (5, 1, None)
    """
    found = re.match(r"(\d+(?:\.\d+)?) GT/s", text)
    speed = found[1].removesuffix(".0") if found else ""
    return _SPEEDS.index(speed) + 1 if speed in _SPEEDS else None


def _lanes(text: str) -> int | None:
    return _width(int(text)) if re.fullmatch(r"\d{1,3}", text, re.ASCII) else None


def _numa_node(root: Path, pci: str) -> int | None:
    text = _attribute(root, pci, "numa_node")  # -1 if the firmware does not give it
    return int(text) if re.fullmatch(r"\d{1,5}", text, re.ASCII) else None


def _from_proc(root: Path) -> str:
    text = _text(root / "proc/driver/nvidia/version")
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)(?:\s|$)", text, re.MULTILINE)
    return found[1] if found else ""
