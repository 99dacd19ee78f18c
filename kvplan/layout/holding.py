"""Whether a tensor still has the memory that a layout describes.

A layout keeps its tensors and their storages, so that memory stays allocated where a tensor lets go of it. A storage
can also be resized in place, and then frees what it had. No tensor tells anybody of either: it has to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from kvplan.errors import LayoutError

# Submits that ask the same tensor before they go on to the next: one that was not asked for long is in no cache of the
# CPU's, and asking it takes 0.5 us more.
SUBMITS = 8


class Holding(NamedTuple):
    """What one tensor said of its memory when it was described, and how to ask again.

    Attributes:
        ask: its ``data_ptr``.
        address: what that said, which may lie inside the allocation.
        storage: what keeps the allocation; ``len`` of it is its bytes. ``()`` of tensors without one.
        nbytes: what that said.
    """

    ask: Callable[[], int]
    address: int
    storage: Any
    nbytes: int

    @classmethod
    def of(cls, tensor: Any, address: int, storage: Any) -> Holding:
        """Of a tensor as it is now; ``storage`` may be None.

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
        except TypeError:  # a stand-in, or none
            storage, nbytes = (), 0
        return cls(tensor.data_ptr, address, storage, nbytes)

    def moved(self) -> bool:
        """Whether the tensor has other memory now, or less or more of it."""
        return self.ask() != self.address or len(self.storage) != self.nbytes


def check_held(what: object, held: Iterable[Holding]) -> None:
    """All tensors have the memory that was described.

    Args:
        what: the layout, for the message.
        held: of its tensors.

    Raises:
        LayoutError: one has not.
    """
    for one in held:
        if one.moved():
            raise LayoutError(
                f"a tensor of {what!r} has other memory now: it began at {one.address:#x} in a storage of {one.nbytes} "
                f"bytes, and begins at {one.ask():#x} in one of {len(one.storage)}; describe it again after resize_, "
                "set_, share_memory_ or an assignment to its data"
            )


def questions(src: Sequence[Holding], dst: Sequence[Holding]) -> Iterator[Callable[[], bool]] | None:
    """What one submit after another asks, without end: whether a tensor of each side still has its memory.

    Of 80 layers, asking all takes longer than planning; one of each side takes 0.3 us. Each tensor has its turn.

    Returns:
        Functions that are true while all is as described; None where no tensor can be asked.

    >>> import torch
    >>> tensor = torch.zeros(8, 4)
    >>> asked = questions([], [Holding.of(tensor, tensor.data_ptr(), tensor.untyped_storage())])
    >>> next(asked)()
    True
    >>> tensor.data = torch.zeros(8, 4)
    >>> next(asked)()
    False
    """
    if not src and not dst:
        return None
    count = max(len(src), len(dst))
    pairs = [[side[k % len(side)] for side in (src, dst) if side] for k in range(count)]
    return cycle([question for pair in pairs for question in [_question(*pair)] * SUBMITS])


def _question(one: Holding, other: Holding | None = None) -> Callable[[], bool]:
    """Whether one or both still have their memory; written out, since a loop or a call would cost as much as asking."""
    ask, address, storage, nbytes = one
    if other is None:
        return lambda: ask() == address and len(storage) == nbytes
    ask_other, other_address, other_storage, other_nbytes = other
    return lambda: (
        ask() == address
        and len(storage) == nbytes
        and ask_other() == other_address
        and len(other_storage) == other_nbytes
    )
