"""Check that tensors still have the memory that a layout describes.

A layout keeps its tensors and their storages, so that memory stays allocated when a tensor takes other memory. But a
storage can be resized in place, which frees its memory. A tensor reports neither change, so ``compile`` and ``prepare``
look at every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvplan.errors import LayoutError


class Holding(NamedTuple):
    """The memory of one tensor when it was described, and the objects that report its present memory.

    Attributes:
        ask: method ``data_ptr`` of the tensor.
        address: address that ``ask`` returned at the description; it may lie inside the allocation.
        storage: the object that keeps the allocation; its ``len`` is in bytes. ``()`` for tensors without a storage.
        nbytes: bytes of the storage at the description.
    """

    ask: Callable[[], int]
    address: int
    storage: Any
    nbytes: int

    @classmethod
    def of(cls, tensor: Any, address: int, storage: Any) -> Holding:
        """Record the memory that a tensor has now; ``storage`` may be None.

        >>> import torch
        >>> tensor = torch.zeros(8, 4)
        >>> held = Holding.of(tensor, tensor.data_ptr(), tensor.untyped_storage())
        >>> held.nbytes, held.moved()
        (128, False)
        >>> held.storage.resize_(64).nbytes(), held.moved()
        (64, True)
        """
        try:
            nbytes = len(storage)
        except TypeError:  # a stand-in for a storage, or None
            storage, nbytes = (), 0
        return cls(tensor.data_ptr, address, storage, nbytes)

    def moved(self) -> bool:
        """Tell whether the tensor now has other memory, or less or more memory."""
        return self.ask() != self.address or len(self.storage) != self.nbytes


def check_held(what: object, held: Iterable[Holding]) -> None:
    """Check that all tensors have the memory that was described.

    Args:
        what: the layout, for the message.
        held: records of the layout's tensors.

    Raises:
        LayoutError: a tensor has other memory.
    """
    for one in held:
        if one.moved():
            raise LayoutError(
                f"a tensor of {what!r} has other memory now: it began at {one.address:#x} in a storage of {one.nbytes} "
                f"bytes, and begins at {one.ask():#x} in one of {len(one.storage)}; describe it again after resize_, "
                "set_, share_memory_ or an assignment to its data"
            )
