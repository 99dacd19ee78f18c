"""A driver's library that is none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kvplan.cuda import device as cuda


class Entries:
    """A library: entry points by name, each writes what it is told to and returns a code.

    Attributes:
        gives: by name, what is written through each pointer argument, in order; or a function of the arguments that
            returns it.
        codes: by name, what is returned instead of success; or a function of the arguments that returns it.
        calls: (name, arguments) of all calls.
    """

    def __init__(self) -> None:
        self.gives: dict[str, list | Callable[..., list]] = {
            "cuDriverGetVersion": [12080],
            "cuDeviceGetCount": [2],
            "cuDeviceGet": [1],
            "cuDevicePrimaryCtxRetain": [0xC0],
            "cuCtxGetStreamPriorityRange": [0, -5],
        }
        self.codes: dict[str, int | Callable[..., int]] = {}
        self.calls: list[tuple[str, tuple]] = []
        self.missing: set[str] = {"compile_kernel"}
        self.attributes = {cuda.MAJOR: 9, cuda.MINOR: 0, cuda.MULTIPROCESSORS: 132, cuda.MAX_PITCH: 1 << 31 - 1}
        self._made: dict[str, object] = {}

    def __getattr__(self, name: str):
        if name.startswith("_") or name in self.missing:
            raise AttributeError(name)
        return self._made.setdefault(name, SimpleEntry(self, name))

    def named(self, name: str) -> list[tuple]:
        return [arguments for called, arguments in self.calls if called == name]


class SimpleEntry:
    """One entry point; pointers come as `byref` objects, or as the ctypes objects that they point to."""

    def __init__(self, entries: Entries, name: str) -> None:
        self._entries, self._name = entries, name

    def __call__(self, *arguments):
        entries, name = self._entries, self._name
        assert len(arguments) == len(self.argtypes), f"{name} takes {len(self.argtypes)} arguments"
        for argument, kind in zip(arguments, self.argtypes, strict=True):
            if not hasattr(argument, "_obj"):
                kind.from_param(argument)  # what ctypes would refuse is refused here
        entries.calls.append((name, arguments))
        plain = [getattr(argument, "value", argument) for argument in arguments]
        if name in entries.codes:
            code = entries.codes[name]
            code = code(*plain) if callable(code) else code
            if code:
                return code
        gives = entries.gives.get(name, ())
        gives = iter(gives(*plain) if callable(gives) else gives)
        if name == "cuDeviceGetAttribute":
            gives = iter([entries.attributes[arguments[1]]])
        if name == "cuGetErrorName":
            gives = iter([b"CUDA_ERROR_PLAYED" if arguments[0] != 12345 else None])
        if name == "cuGetErrorString":
            gives = iter([b"it was played" if arguments[0] != 12345 else None])
        for argument, kind in zip(arguments, self.argtypes, strict=True):
            if hasattr(argument, "_obj") or issubclass(kind, ctypes._Pointer):
                cell = getattr(argument, "_obj", argument)
                if isinstance(cell, ctypes.Structure):  # its fields, by name
                    for field, value in next(gives, {}).items():
                        setattr(cell, field, value)
                else:
                    cell.value = next(gives, cell.value)
        return 0
