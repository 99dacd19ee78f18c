"""Check that the content that both layouts hold has the same element type, since a copy converts nothing."""

from __future__ import annotations

from kvplan.errors import IncompatibleLayoutsError
from kvplan.layout.components import Geometry
from kvplan.layout.dtypes import agree
from kvplan.program.matching import Pair, match


def first_retyped(src: Geometry, dst: Geometry) -> Pair | None:
    """Return the first pair whose element types do not agree, or None."""
    here, there = ({component.dtype for component in side.components} for side in (src, dst))
    if all(agree(one, other) for one in here for other in there):  # as for most pairs, which are then not matched
        return None
    return next((pair for pair in match(src, dst) if not agree(pair.src.dtype, pair.dst.dtype)), None)


def check_element_types(src: Geometry, dst: Geometry) -> None:
    """Check that the element types of every pair agree. Plain bytes (integers, unknown types) agree with every type.

    Args:
        src, dst: the two sides, which compile.

    Raises:
        IncompatibleLayoutsError: both types are known, and their formats differ.

    >>> from kvplan import KVLayout
    >>> spec = {"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}}
    >>> a, b, plain = (KVLayout.from_spec(spec | {"dtype": one}).geometry for one in ("bf16", "fp16", "int16"))
    >>> check_element_types(a, plain)
    >>> check_element_types(a, b)
    Traceback (most recent call last):
        ...
    kvplan.errors.IncompatibleLayoutsError: layer 0 'kv' is bf16 in the source and fp16 in the destination. A copy \
converts no numbers: bytes of bf16 would be read as fp16. Give both sides one dtype; or, if the bytes are meant to be \
read so, describe one side as uint8, or compile with reinterpret=True (--reinterpret)
    """
    pair = first_retyped(src, dst)
    if pair is not None:
        held, read = pair.src.dtype, pair.dst.dtype
        raise IncompatibleLayoutsError(
            f"layer {pair.layer} {pair.part!r} is {held} in the source and {read} in the destination. A copy converts "
            f"no numbers: bytes of {held} would be read as {read}. Give both sides one dtype; or, if the bytes are "
            "meant to be read so, describe one side as uint8, or compile with reinterpret=True (--reinterpret)"
        )
