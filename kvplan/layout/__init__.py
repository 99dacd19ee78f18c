"""Where the bytes of a KV cache are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvplan.layout.kvlayout import KVLayout

__all__ = ["KVLayout"]


def __getattr__(name: str) -> Any:
    """Import ``KVLayout`` on first use: the modules of this room do not need it."""
    if name != "KVLayout":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvplan.layout.kvlayout import KVLayout

    return KVLayout
