"""Check that the content that both layouts hold has the same element type, since a copy converts nothing."""

from __future__ import annotations

from collections.abc import Iterable

from kvplan.errors import IncompatibleLayoutsError
from kvplan.layout.components import Component
from kvplan.layout.dtypes import agree
from kvplan.program.matching import Pair


def may_differ(src: Iterable[Component], dst: Iterable[Component]) -> bool:
    """Return whether two components of two layouts have element types that do not agree; it does not pair them."""
    here, there = ({component.dtype for component in side} for side in (src, dst))
    return any(not agree(one, other) for one in here for other in there)


def check_element_types(pairs: Iterable[Pair]) -> None:
    """Check that the element types of every pair agree. Plain bytes (integers, unknown types) agree with every type.

    Args:
        pairs: the pairs that :func:`kvplan.program.matching.match` found.

    Raises:
        IncompatibleLayoutsError: both types are known, and their formats differ.

    >>> from kvplan import KVLayout
    >>> from kvplan.program.matching import match
    >>> spec = {"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}}
    >>> a, b, plain = (KVLayout.from_spec(spec | {"dtype": one}).geometry for one in ("bf16", "fp16", "int16"))
    >>> check_element_types([*match(a, plain), *match(plain, b)])
    >>> check_element_types(match(a, b))
    Traceback (most recent call last):
        ...
    kvplan.errors.IncompatibleLayoutsError: layer 0 'kv' is bf16 in the source and fp16 in the destination. A copy \
converts no numbers: bytes of bf16 would be read as fp16. Give both sides one dtype; or, if the bytes are meant to be \
read so, describe one side as uint8, or compile with reinterpret=True (--reinterpret)
    """
    for pair in pairs:
        src, dst = pair.src.dtype, pair.dst.dtype
        if not agree(src, dst):
            raise IncompatibleLayoutsError(
                f"layer {pair.layer} {pair.part!r} is {src} in the source and {dst} in the destination. A copy converts "
                f"no numbers: bytes of {src} would be read as {dst}. Give both sides one dtype; or, if the bytes are "
                "meant to be read so, describe one side as uint8, or compile with reinterpret=True (--reinterpret)"
            )
