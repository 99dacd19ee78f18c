"""Read single keys of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplan.base.integers import integer
from kvplan.base.limits import LIMITS
from kvplan.base.quoting import quoted
from kvplan.errors import LayoutError


def integer_of(config: Mapping[str, Any], key: str, least: int = 1, most: int = LIMITS.number) -> int:
    """Return an integer of a config.

    Raises:
        LayoutError: the key is missing, or no such integer.

    >>> integer_of({"num_hidden_layers": 32}, "num_hidden_layers")
    32
    >>> integer_of({}, "head_dim", most=1024)
    Traceback (most recent call last):
        ...
    kvplan.errors.LayoutError: 'head_dim' is missing: add it to the config, an integer from 1 to 1024
    """
    if config.get(key) is None:
        raise LayoutError(f"{key!r} is missing: add it to the config, an integer from {least} to {most}")
    return integer(repr(key), config[key], least=least, most=most)


def shown(value: Any) -> str:
    """Return a value of a config as text: what it is, or that it is missing."""
    return "missing" if value is None else quoted(value)
