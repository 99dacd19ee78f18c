"""Small shared pools that the tests of pickles make, some of them in other processes."""

from __future__ import annotations

import os
import pickle
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import kvplan
from kvplan import KVLayout
from kvplan.memory.shared import path_of

_numbers = count()


def rows(layers: tuple[int, ...] | range = (0,)) -> KVLayout:
    """A cache of 8 blocks of 64 bytes."""
    return KVLayout.from_tensors("layer block dim", np.zeros((len(layers), 8, 64), np.uint8), layers=layers)


def pool_of(name: str | Path, notation: str = "block dim", layers: tuple[int, ...] = (0,)) -> KVLayout:
    """A pool for such a cache."""
    return kvplan.allocate(notation, like=rows(layers), shared=name)


def again(value: Any) -> Any:
    """What was pickled and loaded in this process."""
    return pickle.loads(pickle.dumps(value))


def new_name() -> str:
    """A name of /dev/shm that nobody has."""
    return f"kvplan-pickles-{os.getpid()}-{next(_numbers)}"


def check_gone(*names: str) -> None:
    """No pool was left; if one was, it goes now."""
    left = [path for path in map(path_of, names) if path.exists()]
    for path in left:
        path.unlink()
    assert not left, "a pool was left"
