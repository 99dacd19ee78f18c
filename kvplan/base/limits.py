"""Bounds of input that comes from files and other processes: size, depth, counts, work.

Input beyond a bound raises :class:`kvplan.LayoutError`, so that no file takes more than some seconds and gigabytes.
``docs/reference/limits.md`` names those that a user may meet.
"""

from __future__ import annotations

from kvplan.errors import LayoutError


class LIMITS:
    """All bounds of input."""

    # ---- text --------------------------------------------------------------------------------------------------------

    json_nbytes = 64 << 20  # of a dump, card, spec or config: a million blocks in a table take 16 MiB
    toml_nbytes = 64 << 10  # of a spec written by hand, which usually has hundreds of bytes
    profile_nbytes = 1 << 20  # of a device profile, which has some kilobytes
    name_length = 200  # characters of a part or a peer

    # ---- counts ------------------------------------------------------------------------------------------------------

    layers = 1 << 12  # of a model's config; the deepest models have about 128
    heads = 1 << 16  # KV heads of a model's config; models have up to 256
    nodes = 1 << 21  # what the layouts of one file make us list; see ``WEIGHTS``
    number = 2**31 - 1  # the largest number of a layer or a head

    # ---- work --------------------------------------------------------------------------------------------------------

    overlap_steps = 1 << 21  # of the proof that no two coordinates share a byte: about two seconds
    places = 1 << 25  # (component, block)s that are looked up one by one if tables do not nest
    pieces = 1 << 16  # of the common refinement of two layouts, if splits of their axes do not divide each other
    copies = 1 << 24  # of one unit of memory: 128 layers, K and V, 256 tokens, 256 heads, one copy per row
    listed = 1 << 19  # pieces of memory that a file makes us list: copies of a unit, rows of a search or a drawing


# Nodes that each thing counts for, by the memory and the work that it takes.
WEIGHTS = {
    "a layer and part": 128,  # 128 layers of 128 parts
    "a tensor": 64,  # separate ones of a spec
    "a head": 32,
    "an address": 16,  # of a dump; several of one layer and part, if heads are separate allocations
    "a letter": 16,  # of a notation or a dtype
    "a token slot": 1,  # a context of two million tokens in one block
    "a list": 1 << 15,  # of layouts, which may stand in each other
}


class Budget:
    """The nodes and the work that one document may still take; all layouts of a document share one budget.

    >>> Budget().use("a layer and part", 1 << 30)
    Traceback (most recent call last):
    ...
    kvplan.errors.LayoutError: over 2,097,152 nodes in one file (a layer and part 128, a tensor 64, a head 32, \
an address 16, a letter 16, a token slot 1, a list 32768)
    """

    def __init__(self) -> None:
        self._nodes, self._steps = LIMITS.nodes, LIMITS.overlap_steps

    def use(self, what: str, count: int = 1) -> None:
        """Subtract nodes for some things of one kind, a key of ``WEIGHTS``.

        Raises:
            LayoutError: less than this number is left.
        """
        self._nodes -= WEIGHTS[what] * count
        if self._nodes < 0:
            weights = ", ".join(f"{name} {nodes}" for name, nodes in WEIGHTS.items())
            raise LayoutError(f"over {LIMITS.nodes:,} nodes in one file ({weights})")

    def step(self, count: int) -> None:
        """Subtract steps of the proof that no bytes overlap.

        Raises:
            LayoutError: less than this number is left.
        """
        self._steps -= count
        if self._steps < 0:
            raise LayoutError(
                f"axes interleave in too many ways: whether bytes overlap is not known after {LIMITS.overlap_steps:,} "
                "steps; give strides that nest, each larger than all that it steps over"
            )
