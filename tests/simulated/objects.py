"""What torch would give a caller: tensors, streams and events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.simulated.device import Device


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

    @classmethod
    def on(cls, device: Device, stream: int) -> Event:
        """One recorded on a stream."""
        event = device.event()
        device.theirs.add(event)
        device.record(event, stream)
        return cls(event)

    def synchronize(self) -> None:
        raise AssertionError("kvplan blocked the CPU on an event")
