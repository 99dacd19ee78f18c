"""Names and files of pools that processes share, which no test leaves behind."""

from __future__ import annotations

import gc
import os
from itertools import count

import pytest

from kvplan.memory.shared import path_of

_numbers = count()


@pytest.fixture
def name():
    """A name of /dev/shm that nobody has, and with ``-2`` another one; the test leaves nothing behind."""
    made = f"kvplan-tests-{os.getpid()}-{next(_numbers)}"
    yield made
    gc.collect()  # what errors that were caught keep
    left = [path for path in map(path_of, (made, f"{made}-2")) if path.exists()]
    for path in left:
        path.unlink()
    assert not left, "a pool was left"


@pytest.fixture
def path(tmp_path):
    """A file's path."""
    yield tmp_path / "pool"
    gc.collect()
