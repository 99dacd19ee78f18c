"""Compiled loops over the columns of a recipe: the addresses of units as indices, and back.

A recipe is written and read between the submit of a transfer and its first byte. In numpy, each pass over the units is
a call of its own, and the division of the addresses takes longer than all else.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvplan.plan.jit import brief as _brief

SAMPLE: Final = 64  # addresses whose common divisor is tried for all


@_brief
def step_of(addresses, step):
    """Return the lowest address, the highest, and the largest step that the first few addresses have in common.

    Args:
        addresses: (n,) int64, at least one; all differ by multiples of ``step``.
        step: in bytes; returned if the first few addresses are equal.
    """
    low, high = addresses[0], addresses[0]
    for k in range(addresses.size):
        low, high = min(low, addresses[k]), max(high, addresses[k])
    common = np.int64(0)
    for k in range(min(SAMPLE, addresses.size)):
        rest = addresses[k] - low
        while rest:  # Euclid's algorithm
            common, rest = rest, common % rest
    return low, high, common or np.int64(step)


@_brief
def divide(addresses, low, step, most, out):
    """Write the distances from the lowest address, in steps; return False if one is no multiple of the step.

    A number that the odd part of the step divides is divided by a product: with the number whose product with the odd
    part is 1, modulo 2^64. Any other number gives more than ``most``, the largest possible quotient.

    Args:
        addresses: (n,) int64.
        low: the lowest.
        step: in bytes, positive.
        most: the distance from the lowest to the highest, divided by the step.
        out: (n,) unsigned integers, of which one holds ``most``.
    """
    shift, odd, one = np.uint64(0), np.uint64(step), np.uint64(1)
    while not odd & one:
        shift, odd = shift + one, odd >> one
    inverse = odd
    for _ in range(5):  # each step doubles the number of right bits, of which there are three at first
        inverse *= np.uint64(2) - odd * inverse
    rest, bound = (one << shift) - one, np.uint64(most)
    fine = True
    for k in range(addresses.size):
        far = np.uint64(addresses[k] - low)
        index = (far >> shift) * inverse
        fine &= (index <= bound) & ((far & rest) == np.uint64(0))
        out[k] = index
    return fine


@_brief
def addresses_of(index, first, step, indices, addresses):
    """Write the addresses of units from their indices.

    Args:
        index: (n,) unsigned integers, at least one.
        first: address of index 0.
        step: in bytes.
        indices: (n,) int64: the indices are written here; without items, they are not written.
        addresses: (n,) int64: the addresses are written here. They are right if none is beyond 2^62.

    Returns:
        The lowest index and the highest.
    """
    low = high = index[0]
    for k in range(index.size):
        one = index[k]
        low, high = min(low, one), max(high, one)
        addresses[k] = first + step * np.int64(one)
    if indices.size:
        for k in range(index.size):
            indices[k] = index[k]
    return low, high


@_brief
def is_repeated(indices, low, seen):
    """Return whether an index stands twice.

    Args:
        indices: (n,) int64.
        low: the lowest.
        seen: uint8 zeros, one for each number from the lowest to the highest.
    """
    for k in range(indices.size):
        at = indices[k] - low
        if seen[at]:
            return True
        seen[at] = 1
    return False
