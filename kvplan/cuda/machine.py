"""A GPU's name and place in the machine: the key of a device profile, and what ``kvplan doctor`` shows."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, create_string_buffer
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplan.cuda.driver import SUCCESS, Driver, driver
from kvplan.errors import PathError

ROOT = Path("/")

# PCI Express generation by GT/s per lane, and numbers of lanes, as sysfs writes them.
_GENERATIONS = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6, "128": 7}
_WIDTHS = {"1", "2", "4", "8", "12", "16", "32"}  # 0 and 255 stand for an unknown number
_FROM_NVML = ("CurrPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkGeneration", "MaxPcieLinkWidth")


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
    name = create_string_buffer(256)
    cu.call("cuDeviceGetName", byref(name), len(name), cu.handle(ordinal))
    pci = bus_id(cu, ordinal)
    folder = root / "sys/bus/pci/devices" / (pci or "unknown")
    with nvml() as ask:
        version = ask("nvmlSystemGetDriverVersion")
        gpu = ask("nvmlDeviceGetHandleByPciBusId", pci)
        link = Link(*(ask(f"nvmlDeviceGet{name}", gpu) for name in _FROM_NVML))
    if link == Link():
        link = _link_from_sysfs(folder)
    node = _text(folder / "numa_node")  # -1 if the firmware does not give it
    return Machine(
        name.value.decode(errors="replace"), version or _version_from_proc(root), link, cu.version, pci,
        int(node) if node.isdecimal() else None,
    )  # fmt: skip


def bus_id(cu: Driver, ordinal: int) -> str:
    """Return the bus id of a GPU in lower case, such as ``"0000:0f:00.0"``; ``""`` if the driver does not give it."""
    written = create_string_buffer(32)
    code = cu.cuDeviceGetPCIBusId(byref(written), len(written), cu.handle(ordinal))
    return written.value.decode().lower() if code == SUCCESS else ""


def uuid_of(cu: Driver, ordinal: int) -> str:
    """Return the UUID of a visible GPU, as ``nvidia-smi -L`` shows it without its prefix.

    All processes of a machine agree on it, and ``CUDA_VISIBLE_DEVICES`` changes the numbers of GPUs.
    """
    written = create_string_buffer(16)
    cu.call("cuDeviceGetUuid_v2", byref(written), cu.handle(ordinal))
    return str(uuid.UUID(bytes=written.raw))


def ordinal_here(cu: Driver, gpu: str) -> int:
    """Return this process's number of a GPU that another process names by its UUID.

    Raises:
        PathError: the GPU is not visible in this process.
    """
    here = {uuid_of(cu, ordinal): ordinal for ordinal in range(cu.devices())}
    if gpu not in here:
        raise PathError(
            f"the other process's memory is of GPU-{gpu}, which this process does not see; it sees "
            f"{', '.join(f'GPU-{each}' for each in here) or 'no GPU'}. "
            "Add it to CUDA_VISIBLE_DEVICES of this process, which may be in any order"
        )
    return here[gpu]


@contextmanager
def nvml() -> Iterator[Callable[..., Any]]:
    """Open NVML, the library behind nvidia-smi, within a ``with``.

    Yields:
        A function that calls a function of ``pynvml``, by its name. It returns None where NVML does not tell, or an
        argument is None: always, if nvidia-ml-py is not installed or NVML does not start.

    >>> with nvml() as ask:
    ...     version = ask("nvmlSystemGetDriverVersion")  # "580.159.04", or None
    """
    try:
        import pynvml
    except ImportError:
        yield lambda *_: None
        return

    def ask(name: str, *arguments: Any) -> Any:
        try:  # NVML crashes on a handle that it did not give, as that of a GPU that it does not list
            return None if None in arguments else getattr(pynvml, name)(*arguments)
        except pynvml.NVMLError:
            return None

    ask("nvmlInit")
    try:
        yield ask
    finally:
        ask("nvmlShutdown")  # NVML counts its users: it stays open for other users


def _link_from_sysfs(folder: Path) -> Link:
    def generation(name: str) -> int | None:
        return _GENERATIONS.get(_text(folder / name).partition(" ")[0].removesuffix(".0"))

    def width(name: str) -> int | None:
        text = _text(folder / name)
        return int(text) if text in _WIDTHS else None

    return Link(
        generation("current_link_speed"), width("current_link_width"),
        generation("max_link_speed"), width("max_link_width"),
    )  # fmt: skip


def _version_from_proc(root: Path) -> str:
    found = re.search(r"NVRM version:.*?\s(\d+\.[\d.]+)", _text(root / "proc/driver/nvidia/version"))
    return found[1] if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
