"""NVML, the library behind nvidia-smi: open while facts are read from it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_void_p
from typing import Any

from kvplan.cuda.driver import SUCCESS

_ALWAYS: dict[str, tuple[Any, ...]] = {
    "nvmlInit_v2": (),
    "nvmlShutdown": (),
    "nvmlDeviceGetHandleByPciBusId_v2": (c_char_p, POINTER(c_void_p)),
}


@contextmanager
def nvml(entries: Mapping[str, tuple[Any, ...]]) -> Iterator[Any | None]:
    """Open NVML within a ``with``; None if it is missing, too old, or does not start.

    Args:
        entries: types of the arguments, by the name of each entry point that the caller needs.

    >>> with nvml({}) as library:
    ...     found = library is not None
    """
    library = _load({**_ALWAYS, **entries})
    if library is None or library.nvmlInit_v2() != SUCCESS:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()  # NVML counts its users: it stays open for other users


def handle_of(library: Any, pci: str) -> c_void_p | None:
    """Return NVML's handle of the GPU with a bus id, or None."""
    handle = c_void_p()
    found = pci and library.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), byref(handle)) == SUCCESS
    return handle if found else None


def _load(entries: Mapping[str, tuple[Any, ...]]) -> Any | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        for name, types in entries.items():
            entry = getattr(library, name)
            entry.argtypes, entry.restype = types, c_int
    except (OSError, AttributeError):
        return None
    return library
