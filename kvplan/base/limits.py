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
    toml_dots = 64  # of one line: a dotted key takes time quadratic in its parts
    profile_nbytes = 1 << 20  # of a device profile, which has some kilobytes
    spec_levels = 8  # of ``layouts`` inside ``layouts``; one is usual
    notation_length = 1 << 16  # characters, including the notations of merged layouts
    name_length = 200  # characters of a part or a peer

    # ---- counts ------------------------------------------------------------------------------------------------------

    layers = 1 << 12  # of a model's config; the deepest models have about 128
    components = 1 << 14  # (layer, part)s of a layout: 128 layers of 128 parts each
    heads = 1 << 16  # KV heads of a layout; models have up to 256
    block_tokens = 1 << 21  # token slots of a block: a context of two million tokens in one block
    number = 2**31 - 1  # the largest number of a layer or a head
    views = 1 << 17  # (layer, part)s of a dump, each head counted if heads are separate allocations
    tensors = 1 << 15  # separate tensors of a spec: 64 GiB if each takes the 2 MiB of an allocator

    # ---- work --------------------------------------------------------------------------------------------------------

    overlap_steps = 1 << 21  # of the proof that no two coordinates share a byte: about two seconds
    places = 1 << 25  # (component, block)s that are looked up one by one if tables do not nest
    pieces = 1 << 16  # of the common refinement of two layouts, if splits of their axes do not divide each other
    copies = 1 << 24  # of one unit of memory: 128 layers, K and V, 256 tokens, 256 heads, one copy per row
    listed = 1 << 19  # pieces of memory that a file makes us list: copies of a unit, rows of a search or a drawing


_OVER = {
    "components": "over {:,} (layer, part)s; a layout, or a file of several, has at most that number",
    "views": "over {:,} addresses of layers, parts and heads; a dump has at most that number",
    "tensors": "over {:,} separate tensors; a spec, or a file of several, has at most that number",
    "overlap_steps": "axes interleave in too many ways: whether bytes overlap is not known after {:,} steps; give "
    "strides that nest, each larger than all that it steps over",
}


class Budget:
    """The counts and the work that one document may still take; all layouts of a document share one budget.

    >>> Budget().use("components", 1 << 30)
    Traceback (most recent call last):
    ...
    kvplan.errors.LayoutError: over 16,384 (layer, part)s; a layout, or a file of several, has at most that number
    """

    def __init__(self) -> None:
        self._left = {kind: getattr(LIMITS, kind) for kind in _OVER}

    def use(self, kind: str, count: int) -> None:
        """Subtract from one of the remaining counts.

        Args:
            kind: ``"components"``: (layer, part)s. ``"views"``: addresses of a dump, one for each (layer, part), or for
                each of its heads if heads are separate allocations. ``"tensors"``: separate tensors of a spec.
                ``"overlap_steps"``: work of the proof that no bytes overlap.
            count: the number to subtract.

        Raises:
            LayoutError: less than this number is left.
        """
        self._left[kind] -= count
        if self._left[kind] < 0:
            raise LayoutError(_OVER[kind].format(getattr(LIMITS, kind)))
