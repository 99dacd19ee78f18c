"""Compiled loops over the columns of a recipe: the addresses of units as indices, and back.

A recipe is written and read between the submit of a transfer and its first byte. In numpy, each pass over the units is
a call of its own, and the division of the addresses takes longer than all else. Callers give the units in pieces, since
the loops keep the interpreter.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvplan.plan.jit import brief as _brief

PIECE: Final = 1 << 15  # units that callers give a loop at once: it keeps the interpreter, 10 to 20 us for so many


def pieces(count: int) -> list[slice]:
    """Return the slices of so many units that callers give a loop one after another.

    >>> pieces(PIECE + 1)
    [slice(0, 32768, None), slice(32768, 65536, None)]
    """
    return [slice(first, first + PIECE) for first in range(0, count, PIECE)]


@_brief
def bounds_of(addresses):
    """Return the lowest and the highest of (n,) int64 addresses, at least one."""
    low, high = addresses[0], addresses[0]
    for k in range(addresses.size):
        low, high = min(low, addresses[k]), max(high, addresses[k])
    return low, high


@_brief
def step_of(addresses, low, step):
    """Return the largest step by which addresses differ from the lowest one.

    Args:
        addresses: (n,) int64; all differ from ``low`` by multiples of ``step``.
        low: the lowest.
        step: in bytes; returned if all are the lowest.
    """
    common = np.int64(0)
    for k in range(addresses.size):
        rest = addresses[k] - low
        while rest:  # Euclid's algorithm
            common, rest = rest, common % rest
    return common or np.int64(step)


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
def addresses_of(index, first, step, addresses):
    """Write the addresses of units from their indices.

    Args:
        index: (n,) unsigned integers, at least one.
        first: address of index 0.
        step: in bytes.
        addresses: (n,) int64: the addresses are written here. They are right if none is beyond 2^62.

    Returns:
        The lowest index and the highest.
    """
    low = high = index[0]
    for k in range(index.size):
        one = index[k]
        low, high = min(low, one), max(high, one)
        addresses[k] = first + step * np.int64(one)
    return low, high


def load() -> None:
    """Compile the loops for the types of their arguments, or load them from numba's cache."""
    row = np.zeros(1, np.int64)
    bounds_of(row)
    step_of(row, 0, 1)
    for width in (1, 2, 4, 8):
        index = np.zeros(1, f"<u{width}")
        divide(row, 0, 1, 0, index)
        index.flags.writeable = False  # as those of a message
        addresses_of(index, 0, 1, row)
