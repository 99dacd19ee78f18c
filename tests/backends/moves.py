"""Bytes moved between two described caches, and random ones to move."""

import numpy as np

import kvplan


def noise(shape, seed=0):
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def move(src, dst, src_blocks, dst_blocks):
    """Compile the pair, copy these blocks on the host, and return the program."""
    program = kvplan.compile(src, dst)
    with kvplan.Executor() as executor:
        executor.submit(program.plan(src_blocks, dst_blocks)).result()
    return program
