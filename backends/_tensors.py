"""What several backends share: their common options, facts of tensors, caches with one entry per layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from kvplan.errors import LayoutError

# The engines' name for the order of a page's dims -> the dims: N is tokens, H heads, D dim.
PAGE = {"NHD": "token head dim", "HND": "head token dim"}


class Numbers(TypedDict, total=False):
    """Options that a ``describe`` hands on to :meth:`kvplan.KVLayout.from_tensors`, which says what they mean.

    Attributes:
        layer_start, head_start: global numbers of the first layer and of the first KV head.
        layers: global number of every layer, if they are not consecutive.
        part: name of the content.
        seams: addresses that no descriptor may cross.
    """

    layer_start: int
    head_start: int
    layers: Sequence[int] | None
    part: str
    seams: Sequence[int]


def check_numbers(numbers: Numbers) -> None:
    """Raise TypeError, as Python does, if ``**numbers`` of a ``describe`` has an unknown key.

    >>> check_numbers({"isa": "vec"})
    Traceback (most recent call last):
    ...
    TypeError: describe() got an unexpected keyword argument 'isa'
    """
    for name in numbers:
        if name not in Numbers.__annotations__:
            raise TypeError(f"describe() got an unexpected keyword argument {name!r}")


def rank_of(value: Any) -> int:
    """Return the number of dims of a tensor, or 0 for any other value."""
    return len(value.shape) if hasattr(value, "shape") else 0


def itemsize_of(tensor: Any) -> int:
    """Return the bytes of one element of a tensor."""
    return int(tensor.element_size() if hasattr(tensor, "element_size") else tensor.itemsize)


def steps_of(tensor: Any) -> tuple[int, ...]:
    """Return the strides of a tensor in bytes."""
    if callable(getattr(tensor, "stride", None)):
        return tuple(int(step) * itemsize_of(tensor) for step in tensor.stride())
    return tuple(map(int, tensor.strides))


def content_dims(count: int) -> str:
    """Return the notation of ``count`` dims of content: ``dim``, or its factors.

    >>> content_dims(1), content_dims(3)
    ('dim', 'dim.0 dim.1 dim.2')
    """
    return "dim" if count == 1 else " ".join(f"dim.{k}" for k in range(count))


def dense_inside(tensor: Any) -> bool:
    """Return whether all dims but the first are contiguous, the last one innermost.

    >>> import numpy as np
    >>> dense_inside(np.zeros((8, 4, 2))[::2]), dense_inside(np.zeros((8, 4, 2))[:, ::2])
    (True, False)
    """
    nbytes = itemsize_of(tensor)
    for extent, step in list(zip(tensor.shape, steps_of(tensor), strict=True))[:0:-1]:
        if extent > 1 and step != nbytes:
            return False
        nbytes *= extent
    return True


def check_option(name: str, value: Any, known: Iterable[str]) -> None:
    """Raise LayoutError unless ``value`` is one of the ``known`` names.

    >>> check_option("kv_layout", "HDN", PAGE)
    Traceback (most recent call last):
    ...
    kvplan.errors.LayoutError: kv_layout is 'HDN'; it is one of 'NHD', 'HND'
    """
    if value not in (names := list(known)):
        raise LayoutError(f"{name} is {value!r}; it is one of {', '.join(map(repr, names))}")


def one_per_layer(name: str, value: Any) -> list[Any]:
    """Return the tensors of a list with one tensor per layer; a tensor alone is one layer.

    Raises:
        LayoutError: it is anything else.
    """
    tensors = [value] if hasattr(value, "shape") else value
    if not isinstance(tensors, list | tuple):
        raise LayoutError(
            f"{name} is a {type(value).__name__}; give a list with one tensor a layer, in order of layers"
        )
    for layer, tensor in enumerate(tensors):
        if not hasattr(tensor, "shape"):
            raise LayoutError(f"{name}[{layer}] is a {type(tensor).__name__}; give one tensor a layer")
    return list(tensors)


def layers_of(kv_caches: Any, *, kv_dim: int, expected: str, other: str) -> tuple[Sequence[Any], bool]:
    """Check caches with one entry per layer: a tensor of 5 dims, or a pair ``(k_cache, v_cache)`` of 4 dims each.

    Args:
        kv_caches: a list or tuple of entries of one form; a single tensor or pair is one layer.
        kv_dim: the dim of a tensor that holds K and V, 0 or 1.
        expected: the forms that the backend takes, for messages.
        other: the backend whose ``kv_dim`` is the other number.

    Returns:
        The entries, and whether they are pairs.

    Raises:
        LayoutError: a wrong rank, an extent of ``kv_dim`` that is not 2, or mixed forms.

    >>> import numpy as np
    >>> entries, paired = layers_of(np.zeros((2, 8, 16, 4, 64)), kv_dim=0, expected="", other="")
    >>> len(entries), paired
    (1, False)
    """
    entries = [kv_caches] if rank_of(kv_caches) or _is_pair(kv_caches) else kv_caches
    if not isinstance(entries, list | tuple):
        raise LayoutError(
            f"kv_caches is a {type(entries).__name__}; give a list with one entry a layer, in order of layers"
        )
    pairs = [_is_pair(entry) for entry in entries]
    for layer, (entry, paired) in enumerate(zip(entries, pairs, strict=True)):
        if not paired:
            _check_tensor(entry, f"kv_caches[{layer}]", kv_dim, expected, other)
        if paired != pairs[0]:
            raise LayoutError(f"kv_caches[0] and kv_caches[{layer}] are of different forms; describe each form by "
                              "itself and merge")  # fmt: skip
    return entries, any(pairs)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(rank_of(half) == 4 for half in value)


def _check_tensor(cache: Any, name: str, kv_dim: int, expected: str, other: str) -> None:
    if not rank_of(cache):
        nested = f" of {len(cache)} with ranks {[*map(rank_of, cache)]}" if isinstance(cache, list | tuple) else ""
        raise LayoutError(f"{name} is a {type(cache).__name__}{nested}; {expected}")
    shape, places = tuple(cache.shape), ("first", "second")
    if len(shape) != 5:
        raise LayoutError(f"{name} has shape {shape}, {len(shape)} dims; {expected}")
    if shape[kv_dim] != 2:
        swapped = f"; where K and V stand {places[1 - kv_dim]}, use backends.{other}" if shape[1 - kv_dim] == 2 else ""
        raise LayoutError(
            f"{name} has shape {shape}, whose {places[kv_dim]} extent {shape[kv_dim]} is not 2; {expected}{swapped}"
        )
