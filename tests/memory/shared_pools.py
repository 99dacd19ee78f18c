"""What tests of shared pools store, and other users of their files."""

from __future__ import annotations

import fcntl
import os

import numpy as np

from kvplan import KVLayout

NOTATION = "block layer kv token head dim"


def rank(layers=(0, 1), heads=range(2), dtype=np.int16, part="kv"):
    """A cache of some layers and heads: 4 blocks of 3 tokens."""
    tensors = [np.zeros((2, 4, 3, len(heads), 5), dtype) for _ in layers]
    return KVLayout.from_tensors("layer: kv block token head dim", tensors, layers=layers, head_start=heads.start,
                                 part=part)  # fmt: skip


class Lock:
    """Another user's lock on a file, whatever the file is."""

    def __init__(self, path, kind):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.fd, kind)

    def release(self):
        os.close(self.fd)
