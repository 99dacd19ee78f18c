"""A row of the table of adapters: memory, the call that describes it, and where numpy's indexing finds each element."""

import re
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
        index: where the elements of a row are, in words for :func:`at`, or a function of its arguments.
        notation: what the layout prints. Layers, tokens a block, parts and heads follow from it, where a row does not
            say them: 4 tokens and 2 heads, if there are any, and "k v" beside heads, or "kv". Layers are 0 and 1, or 0
            where no word of the index names them.
        same: further calls that describe the same elements.
        nbytes: published bytes a block.
    """

    name: str
    memory: Any
    describe: Callable[..., Any]
    index: str | Callable[..., np.ndarray]
    notation: str
    blocks: int = 3
    tokens: int = 0
    layers: tuple[int, ...] = ()
    parts: str = ""
    heads: range = range(0)
    same: tuple[Callable[..., Any], ...] = ()
    nbytes: int | None = None

    def __post_init__(self) -> None:
        words = re.findall("[a-z]+", self.notation)
        alone = isinstance(self.index, str) and not re.search(r"(?<![a-z])l(?![a-z_])", self.index)
        plain = {
            "index": at(self.index) if isinstance(self.index, str) else self.index,
            "layers": self.layers or ((0,) if alone else (0, 1)),
            "tokens": self.tokens or (4 if {"token", "subblock"} & {*words} else 1),
            "parts": self.parts or ("k v" if {"kv", "head"} & {*words} else "kv"),
            "heads": self.heads or range(2 if "head" in words else 1),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)


def at(text: str) -> Callable[..., np.ndarray]:
    """A function ``(memory, layer, part, block, token, head)`` -> elements, in order, by numpy's indexing.

    Each word goes a step into the memory: a number or the axis of that letter ("b"), a sum of multiples ("4b+t"), so
    many elements from there on ("8h:8"), or an attribute's name. Layers, parts and heads are counted from the first
    that is held. Behind "|" stand the words of the next part; without it, they hold for all.
    """
    sides = [words.split() for words in text.split(" | ")]

    def index(memory: Any, *place: int) -> np.ndarray:
        for word in sides[place[1]] if len(sides) > 1 else sides[0]:
            start, colon, count = word.partition(":")
            if start.isidentifier() and len(start) > 1:
                memory = getattr(memory, start)
                continue
            first = 0
            for term in filter(None, start.split("+")):
                first += int(term.strip("lpbth") or 1) * (place["lpbth".index(term[-1])] if term[-1].isalpha() else 1)
            memory = memory[first : first + int(count)] if colon else memory[first]
        return memory

    return index


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
