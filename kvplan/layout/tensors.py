"""Read tensors by duck type: torch tensors, numpy arrays, and objects with the same members.

No library is imported to recognise a tensor: ``data_ptr``, ``shape``, ``stride``, ``element_size`` and ``device``
(torch) or ``__array_interface__`` and ``strides`` (numpy) are enough.

A layout keeps its tensors and their storages, so that memory stays allocated when a tensor takes other memory. But a
storage can be resized in place, which frees its memory. A tensor reports neither change, so ``compile`` and ``prepare``
look at every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.values import quoted
from kvplan.errors import LayoutError
from kvplan.layout.components import Region
from kvplan.layout.notation import Notation

ITEMSIZE = {
    "int8": 1, "uint8": 1, "byte": 1, "bool": 1, "fp8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "e4m3": 1, "e5m2": 1,
    "int16": 2, "uint16": 2, "fp16": 2, "float16": 2, "half": 2, "bf16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "fp32": 4, "float32": 4, "float": 4,
    "int64": 8, "uint64": 8, "fp64": 8, "float64": 8, "double": 8,
}  # fmt: skip

_SHORT = {
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
    "float32": "fp32", "float": "fp32", "float64": "fp64", "double": "fp64",
}  # fmt: skip
_FLOATS = ("fp8", "e4m3", "e5m2", "fp16", "bf16", "fp32", "fp64")
_FP8 = ("e4m3", "e5m2", "float8_")


def itemsize_of(dtype: str) -> int:
    """Return the bytes per element of a type; 1 if the name is not known, as of rarer formats of 8 bits.

    >>> itemsize_of("bf16"), itemsize_of("float8_e4m3fnuz"), itemsize_of("complex64")
    (2, 1, 8)
    """
    try:
        return ITEMSIZE.get(dtype) or np.dtype(dtype).itemsize
    except TypeError:
        return 1


def kind_of(dtype: str) -> str:
    """Return the number format of an element type in its short name; ``""`` for plain bytes.

    Integers and unknown types are plain bytes: engines keep bf16 pages in int8 rows, and fp8 caches as uint8.

    >>> kind_of("bfloat16"), kind_of("half"), kind_of("float8_e4m3fnuz"), kind_of("uint8")
    ('bf16', 'fp16', 'float8_e4m3fnuz', '')
    """
    short = _SHORT.get(dtype, dtype)
    return short if short in _FLOATS or short.startswith(("float8_", "float4_", "complex")) else ""


def agree(dtype: str, other: str) -> bool:
    """Return whether bytes of one element type may be read as the other: one is plain bytes, or the formats are equal.

    The name ``fp8`` stands for every format of 8 bits.

    >>> agree("bf16", "bfloat16"), agree("bf16", "uint8"), agree("fp8", "e5m2"), agree("bf16", "fp16")
    (True, True, True, False)
    """
    kinds = {kind_of(dtype), kind_of(other)}
    return "" in kinds or len(kinds) == 1 or ("fp8" in kinds and any(kind.startswith(_FP8) for kind in kinds))


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


class Holding(NamedTuple):
    """The memory of one tensor when it was described, and the objects that report its present memory.

    Attributes:
        ask: method ``data_ptr`` of the tensor, or the same of an array.
        address: address that ``ask`` returned at the description; it may lie inside the allocation.
        storage: the object that keeps the allocation; its ``len`` is in bytes. ``()`` for tensors without a storage.
        nbytes: bytes of the storage at the description; 0 without one.
    """

    ask: Callable[[], int]
    address: int
    storage: Any
    nbytes: int

    def moved(self) -> bool:
        """Tell whether the tensor now has other memory, or less or more memory."""
        return self.ask() != self.address or len(self.storage) != self.nbytes


def check_held(what: object, holdings: Iterable[Holding]) -> None:
    """Check that all tensors have the memory that was described.

    Args:
        what: the layout, for the message.
        holdings: records of the layout's tensors.

    Raises:
        LayoutError: a tensor has other memory.
    """
    for holding in holdings:
        if holding.moved():
            raise LayoutError(
                f"a tensor of {what!r} has other memory now than at {holding.address:#x}, of {holding.nbytes} bytes; "
                "describe it again after resize_, set_, share_memory_ or an assignment to its data"
            )


def is_tensor(value: object) -> bool:
    """Tell whether a value has the members of a tensor.

    >>> import numpy as np
    >>> is_tensor(np.zeros(3)), is_tensor([np.zeros(3)])
    (True, False)
    """
    return _has(value, "data_ptr shape stride element_size") or _has(value, "__array_interface__ strides shape")


def _has(value: object, names: str) -> bool:
    return all(hasattr(value, name) for name in names.split())


def facts(tensor: Any) -> TensorFacts:
    """Read the address, shape, strides and allocation of a tensor, as :func:`is_tensor` recognises it.

    Raises:
        LayoutError: the tensor has no memory.
    """
    read = _torch_facts(tensor) if _has(tensor, "data_ptr") else _numpy_facts(tensor)
    if read.address == 0 and 0 not in read.shape:  # other checks refuse empty tensors
        what = f"a {type(tensor).__name__} of shape {quoted(read.shape)}"
        raise LayoutError(f"{what} has the address null: it has no memory; describe it with KVLayout.from_spec")
    return read


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
    storage: Any = ()
    if hasattr(tensor, "untyped_storage"):
        storage = tensor.untyped_storage()
        low, nbytes = int(storage.data_ptr()), int(storage.nbytes())
    pinned = device == "cpu" and hasattr(tensor, "is_pinned") and bool(tensor.is_pinned())
    if not hasattr(storage, "__len__"):  # a stand-in for a storage
        storage = ()
    held = Holding(tensor.data_ptr, address, storage, len(storage))
    return TensorFacts(
        address, shape, strides, itemsize, dtype, Region(low, nbytes, device, pinned, owner=tensor, held=held)
    )


def _numpy_facts(array: Any) -> TensorFacts:
    if getattr(array.dtype, "hasobject", False):
        raise LayoutError(f"an array of {array.dtype} holds references to objects; copying their bytes breaks them")
    root = array
    while hasattr(getattr(root, "base", None), "__array_interface__"):
        root = root.base
    interface, itemsize = root.__array_interface__, int(getattr(root, "itemsize", array.itemsize))
    strides = interface.get("strides") or contiguous(interface["shape"], itemsize)
    low, nbytes = _hull(interface["data"][0], interface["shape"], strides, itemsize)
    held = Holding(partial(_address_of, root), interface["data"][0], (), 0)
    region = Region(low, nbytes, writable=bool(array.flags.writeable), owner=array, held=held)
    return TensorFacts(
        _address_of(array), tuple(array.shape), tuple(array.strides), int(array.itemsize), str(array.dtype), region
    )


def _address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in bytes.

    >>> contiguous((4, 2, 8), 2)
    (32, 16, 2)
    """
    strides: list[int] = []
    for size in reversed(shape):
        strides.append(itemsize)
        itemsize *= max(size, 1)
    return tuple(reversed(strides))


def _hull(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return the address of the lowest element, and the bytes from there to the end of the highest element."""
    steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size]
    low = sum(step for step in steps if step < 0)
    return address + low, sum(map(abs, steps)) + itemsize


def gather(notation: Notation, tensors: Any) -> tuple[list[TensorFacts], dict[str, int]]:
    """Return the facts of all tensors in nested sequences, and the extents of the axes left of the colon.

    Raises:
        LayoutError: there is a sequence in place of a tensor or the reverse, or the nesting is ragged or empty.
    """
    text, counts = quoted(str(notation)), dict[str, int]()
    level: list[Any] = [tensors]
    for axis in notation.nesting:
        for value in level:
            if is_tensor(value) or not isinstance(value, list | tuple):
                given = "one tensor" if is_tensor(value) else type(value).__name__
                given += "; give list(tensors.values())" * isinstance(value, dict)
                wanted = f"{axis!r} stands left of the ':' in {text}, which asks for a sequence of tensors"
                raise LayoutError(f"{wanted} there; got {given}")
        lengths = {len(value) for value in level}
        counts[axis] = lengths.pop()
        if lengths:
            raise LayoutError(f"ragged nesting along {axis!r}; every sequence must have the same number of tensors")
        if not counts[axis]:
            raise LayoutError(f"no tensors along {axis!r}; a layout has at least one")
        level = [item for value in level for item in value]
    for value in level:
        if not is_tensor(value):
            hint = "; the axis of a list stands left of a ':', as in 'layer: ...'" * isinstance(value, list | tuple)
            raise LayoutError(f"a tensor is due where {text} has its dims; got {type(value).__name__}{hint}")
    return [facts(value) for value in level], counts


def check_alike(notation: Notation, tensors: Sequence[TensorFacts]) -> None:
    """Check that all tensors of one notation have the same shape, strides, dtype and device.

    Raises:
        LayoutError: a tensor differs from tensor 0; or a dim has extent zero.
    """
    first, text = tensors[0], quoted(str(notation))
    if len(first.shape) != len(notation.dims):
        shape = f"the tensor's shape {quoted(first.shape)}"
        raise LayoutError(f"{text} has {len(notation.dims)} dims; {shape} has {len(first.shape)}")
    for name in ("shape", "strides", "itemsize", "dtype", "device"):
        of_first, *others = (getattr(each.region if name == "device" else each, name) for each in tensors)
        for k, other in enumerate(others, 1):
            if other != of_first:
                raise LayoutError(
                    f"tensor {k} has {name} {other}, tensor 0 has {of_first}; describe those of each shape by "
                    "themselves, with their numbers (layers=...), and join them by KVLayout.merge"
                )
    if 0 in first.shape:
        raise LayoutError(f"shape {first.shape} holds nothing: dim {first.shape.index(0)} of {text} is zero")
    if min(first.strides, default=0) < 0:
        raise LayoutError(f"strides {quoted(first.strides)} (bytes) of {text} run backwards; pass the tensor unflipped")
