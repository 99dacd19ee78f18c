"""Read tensors by duck type: torch tensors, numpy arrays, and objects with the same members.

No library is imported to recognise a tensor: ``data_ptr``, ``shape``, ``stride``, ``element_size`` and ``device``
(torch) or ``__array_interface__`` and ``strides`` (numpy) are enough.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvplan.base.values import quoted
from kvplan.errors import LayoutError
from kvplan.layout.components import Region
from kvplan.layout.holding import Holding
from kvplan.layout.notation import Notation


class TensorFacts(NamedTuple):
    """The facts of one tensor that a layout is made of.

    Attributes:
        address: address of the first element.
        shape: extents in elements.
        strides: strides in bytes.
        itemsize: bytes per element.
        dtype: name of the element type, without the name of the framework.
        region: the allocation that holds the tensor.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    region: Region


def is_tensor(value: object) -> bool:
    """Tell whether a value has the members of a tensor.

    >>> import numpy as np
    >>> is_tensor(np.zeros(3)), is_tensor([np.zeros(3)])
    (True, False)
    """
    return _is_torch_like(value) or _is_numpy_like(value)


def _is_torch_like(value: object) -> bool:
    return all(hasattr(value, name) for name in ("data_ptr", "shape", "stride", "element_size"))


def _is_numpy_like(value: object) -> bool:
    return hasattr(value, "__array_interface__") and hasattr(value, "strides") and hasattr(value, "shape")


def facts(tensor: Any) -> TensorFacts:
    """Read the address, shape, strides and allocation of a tensor, as :func:`is_tensor` recognises it.

    Raises:
        LayoutError: the tensor has no memory.
    """
    return _torch_facts(tensor) if _is_torch_like(tensor) else _numpy_facts(tensor)


def _torch_facts(tensor: Any) -> TensorFacts:
    device = str(getattr(tensor, "device", "cpu"))
    if device == "meta" or hasattr(tensor, "fake_mode"):  # shapes without bytes, of torch.compile
        kind = "on device 'meta'" if device == "meta" else f"of class {type(tensor).__name__}"
        raise LayoutError(f"a tensor {kind} has no memory; describe it with KVLayout.from_spec")
    address, itemsize = int(tensor.data_ptr()), int(tensor.element_size())
    shape = tuple(int(size) for size in tensor.shape)
    strides = tuple(int(stride) * itemsize for stride in tensor.stride())
    dtype = str(getattr(tensor, "dtype", f"{itemsize} bytes")).removeprefix("torch.")
    low, nbytes = _hull(address, shape, strides, itemsize)
    storage, allocation = getattr(tensor, "untyped_storage", None), None
    if callable(storage):
        allocation = storage()
        low, nbytes = int(allocation.data_ptr()), int(allocation.nbytes())
    _check_address(address, shape, type(tensor).__name__)
    pinned = device == "cpu" and callable(getattr(tensor, "is_pinned", None)) and bool(tensor.is_pinned())
    held = Holding.of(tensor, address, allocation)
    region = Region(low, nbytes, device, pinned=pinned, owner=tensor, held=held)
    return TensorFacts(address, shape, strides, itemsize, dtype, region)


def _numpy_facts(array: Any) -> TensorFacts:
    if getattr(array.dtype, "hasobject", False):
        raise LayoutError(
            f"an array of {array.dtype} holds references to Python objects; copying their bytes breaks them"
        )
    address = int(array.__array_interface__["data"][0])
    shape, strides = tuple(map(int, array.shape)), tuple(map(int, array.strides))
    _check_address(address, shape, type(array).__name__)
    root = array
    while getattr(root, "base", None) is not None and hasattr(root.base, "__array_interface__"):
        root = root.base
    interface = root.__array_interface__
    root_strides = interface.get("strides")
    itemsize = int(array.itemsize)
    low, nbytes = int(interface["data"][0]), 0
    if root_strides is None:  # C-contiguous: the root is the whole allocation
        nbytes = int(getattr(root, "nbytes", 0))
    if not nbytes:
        root_itemsize = int(getattr(root, "itemsize", itemsize))
        contiguous = root_strides or _contiguous(interface["shape"], root_itemsize)
        low, nbytes = _hull(low, interface["shape"], contiguous, root_itemsize)
    region = Region(low, nbytes, "cpu", writable=bool(array.flags.writeable), owner=array, held=_unresizable(root))
    return TensorFacts(address, shape, strides, itemsize, str(array.dtype), region)


def _check_address(address: int, shape: Sequence[int], kind: str) -> None:
    """Check that a tensor with content has an address. Other checks refuse empty tensors, whose address is often 0.

    Raises:
        LayoutError: the address is null.
    """
    if address == 0 and 0 not in shape:
        raise LayoutError(
            f"a {kind} of shape {quoted(tuple(shape))} has the address null: it has no memory (a fake tensor, or a "
            "freed storage); describe it with KVLayout.from_spec"
        )


def _unresizable(array: Any) -> Any:
    """Return a weak reference to an array. While it exists, ``ndarray.resize`` raises an error (numpy 1.26 to 2.4).

    ``resize`` would free the array's memory. With ``refcheck=False``, it does so in spite of the strong references that
    layouts hold; only a weak reference stops it.
    """
    try:
        return weakref.ref(array)
    except TypeError:  # not an array of numpy
        return None


def _contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides: list[int] = []
    step = itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _hull(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return the address of the lowest element, and the bytes from there to the end of the highest element."""
    low = sum(min((size - 1) * stride, 0) for size, stride in zip(shape, strides, strict=True) if size)
    high = sum(max((size - 1) * stride, 0) for size, stride in zip(shape, strides, strict=True) if size)
    return address + low, high - low + itemsize


def gather(notation: Notation, tensors: Any) -> tuple[list[TensorFacts], dict[str, int]]:
    """Return the facts of all tensors in nested sequences, and the extents of the axes left of the colon.

    Raises:
        LayoutError: there is a sequence in place of a tensor or the reverse, or the nesting is ragged or empty.
    """
    extents: dict[str, int] = {}
    level: list[Any] = [tensors]
    for axis in notation.nesting:
        counts: set[int] = set()
        for value in level:
            if is_tensor(value) or not isinstance(value, list | tuple):
                given = "one tensor" if is_tensor(value) else type(value).__name__
                given += "; give list(tensors.values())" * isinstance(value, dict)
                raise LayoutError(f"{axis!r} stands left of the ':' in {quoted(str(notation))}, which asks for a "
                                  f"sequence of tensors there; got {given}")  # fmt: skip
            counts.add(len(value))
        if len(counts) != 1:
            raise LayoutError(f"ragged nesting: {sorted(counts)} tensors along {axis!r}; every sequence must have "
                              "the same length")  # fmt: skip
        extents[axis] = counts.pop()
        if not extents[axis]:
            raise LayoutError(f"no tensors along {axis!r}; a layout has at least one")
        level = [item for value in level for item in value]
    for value in level:
        if not is_tensor(value):
            hint = "; the axis of a list stands left of a ':', as in 'layer: ...'" * isinstance(value, list | tuple)
            raise LayoutError(
                f"a tensor is due where {quoted(str(notation))} has its dims; got {type(value).__name__}{hint}"
            )
    return [facts(value) for value in level], extents


def check_alike(notation: Notation, tensors: Sequence[TensorFacts]) -> None:
    """Check that all tensors of one notation have the same shape, strides, dtype and device.

    Raises:
        LayoutError: a tensor differs from tensor 0; or a dim has extent zero.
    """
    first = tensors[0]
    if len(first.shape) != len(notation.dims):
        raise LayoutError(f"{quoted(str(notation))} has {len(notation.dims)} dims; the tensor's shape "
                          f"{quoted(first.shape)} has {len(first.shape)}")  # fmt: skip
    for k, other in enumerate(tensors):
        if other.region.device != first.region.device:
            raise LayoutError(f"tensor {k} is on {other.region.device}, tensor 0 on {first.region.device}; "
                              "a layout lives on one device")  # fmt: skip
    for name in ("shape", "strides", "itemsize", "dtype"):
        for k, other in enumerate(tensors):
            if getattr(other, name) != getattr(first, name):
                raise LayoutError(
                    f"tensor {k} has {name} {getattr(other, name)}, tensor 0 has {getattr(first, name)}; tensors of "
                    "one notation must agree: describe those of each shape by themselves, with their numbers "
                    "(layers=...), and join them by KVLayout.merge"
                )
    if 0 in first.shape:
        raise LayoutError(
            f"shape {first.shape} holds nothing: dim {first.shape.index(0)} of {quoted(str(notation))} is zero"
        )
    if min(first.strides, default=0) < 0:
        raise LayoutError(
            f"strides {quoted(first.strides)} (bytes) of {quoted(str(notation))} run backwards; pass the tensor "
            "unflipped"
        )
