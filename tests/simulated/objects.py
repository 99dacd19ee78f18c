"""What torch would give a caller: tensors, streams and events."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np


@dataclass(eq=False)
class Tensor:
    """CPU memory that says it is a GPU's: what kvplan reads of a tensor, and no more."""

    array: np.ndarray
    device: str = "cuda:0"

    def data_ptr(self) -> int:
        return self.array.__array_interface__["data"][0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)


@dataclass
class Stream:
    """What `after=` and `wait` are given."""

    cuda_stream: int

    def synchronize(self) -> None:
        raise AssertionError("kvplan blocked the CPU on a stream")


@dataclass
class Event:
    """Somebody's event, as torch has them."""

    cuda_event: int

    def synchronize(self) -> None:
        raise AssertionError("kvplan blocked the CPU on an event")


class Torch(ModuleType):
    """Torch, on whose GPUs some stream is the current one."""

    def __init__(self, stream: int) -> None:
        import torch

        super().__init__("torch")
        self._torch = torch
        self.cuda = SimpleNamespace(is_initialized=lambda: True, is_available=lambda: False)
        self._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


@contextmanager
def current_stream(stream: int) -> Iterator[None]:
    """Make a stream torch's current one."""
    with mock.patch.dict(sys.modules, torch=Torch(stream)):
        yield
