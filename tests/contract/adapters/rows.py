"""A row of the table of adapters: memory, the call that describes it, and where numpy's indexing finds each element."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """One variant of one adapter.

    Attributes:
        name: the backend, and its variant.
        memory: numpy arrays, nested as the adapter takes them in lists, tuples, dicts and namespaces. As torch tensors,
            int16 is bfloat16 and int8 is float8_e4m3fn.
        describe: the call, given the memory.
        index: ``(memory, layer, part, block, token, head)`` -> the elements of this row, in order. Layers, parts and
            heads are counted from the first that is held.
        nbytes: bytes a block.
        notation: what the layout prints.
        same: further calls that describe the same elements.
    """

    name: str
    memory: Any
    describe: Callable[..., Any]
    index: Callable[..., np.ndarray]
    nbytes: int
    notation: str
    blocks: int = 3
    tokens: int = 4
    layers: tuple[int, ...] = (0, 1)
    parts: str = "k v"
    heads: range = range(2)
    same: tuple[Callable[..., Any], ...] = ()


def named(groups):
    """The rows of all groups, with the group's name before the row's."""
    return [replace(row, name=f"{group}: {row.name}") for group, rows in groups.items() for row in rows]


def noise(*shape, kind=np.int16):
    """Random elements of a kind."""
    count = int(np.prod(shape)) * np.dtype(kind).itemsize
    return np.random.default_rng(count).integers(0, 256, count, np.uint8).view(kind).reshape(shape)


def per_layer(*shape, kind=np.int16, layers=2):
    """One array a layer."""
    return [noise(*shape, kind=kind) for _ in range(layers)]


def mapped(function, memory):
    """Apply a function to every array of nested memory."""
    if isinstance(memory, np.ndarray):
        return function(memory)
    if isinstance(memory, list | tuple):
        return type(memory)(mapped(function, item) for item in memory)
    if isinstance(memory, dict):
        return {key: mapped(function, item) for key, item in memory.items()}
    if isinstance(memory, SimpleNamespace):
        return SimpleNamespace(**mapped(function, vars(memory)))
    return memory


def as_torch(array):
    """The same memory as a torch tensor."""
    import torch

    kinds = {np.dtype(np.int16): torch.bfloat16, np.dtype(np.int8): torch.float8_e4m3fn}
    tensor = torch.from_numpy(array)
    return tensor.view(kinds.get(array.dtype, tensor.dtype))


def allocations(memory):
    """Every array that owns bytes of nested memory."""
    found = {}

    def look(array):
        while isinstance(array.base, np.ndarray):
            array = array.base
        found[id(array)] = array

    mapped(look, memory)
    return list(found.values())
