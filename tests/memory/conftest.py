"""Names and files of pools that processes share, which no test leaves behind."""

from __future__ import annotations

import gc

import pytest

from kvplan.memory import shared
from tests.memory.pickled_pools import check_gone, new_name


@pytest.fixture
def name():
    """A name of /dev/shm that nobody has; the test leaves nothing behind."""
    made = new_name()
    yield made
    gc.collect()
    check_gone(made, f"{made}-2")


@pytest.fixture
def path(tmp_path):
    """A file's path; nothing stays locked."""
    yield tmp_path / "pool"
    if shared._uses:
        gc.collect()
    assert not shared._uses
