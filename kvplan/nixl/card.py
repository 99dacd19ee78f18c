"""The card of a process that NIXL reaches: its layouts, and what NIXL must know, as text that goes over any channel."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from kvplan.base.limits import LIMITS, Budget
from kvplan.base.quoting import quoted
from kvplan.base.reading import json_of
from kvplan.errors import LayoutError
from kvplan.layout.dump import built_from_dump, document_of
from kvplan.layout.kvlayout import KVLayout

SCHEMA = "kvplan.nixl/1"
_KEYS = ("schema", "name", "layouts", "metadata")
_RIGHT = "give what NixlAgent.card() made"


def write(name: str, layouts: Mapping[str, KVLayout], metadata: bytes) -> bytes:
    """The card of a process."""
    document = {
        "schema": SCHEMA,
        "name": name,
        "layouts": {key: document_of(layout.built) for key, layout in layouts.items()},
        "metadata": base64.b64encode(metadata).decode(),
    }
    return json.dumps(document).encode()


def read(card: bytes) -> tuple[str, dict[str, KVLayout], bytes]:
    """Name, layouts and NIXL's metadata of a card.

    Raises:
        LayoutError: what is no card, or holds a layout that cannot be.
    """
    if not isinstance(card, bytes | bytearray | str):
        raise LayoutError(f"that is no card, but a {type(card).__name__}; {_RIGHT}")
    try:
        document = json_of(card if isinstance(card, str) else bytes(card))
    except LayoutError as error:
        raise LayoutError(f"that is no card: {error}; {_RIGHT}") from None
    if not isinstance(document, dict):
        raise LayoutError(f"that is no card, but {quoted(document)}; {_RIGHT}")
    if lacked := [key for key in _KEYS if key not in document]:
        raise LayoutError(f"that is no card: it lacks {lacked[0]!r}; {_RIGHT}")
    if document["schema"] != SCHEMA:
        raise LayoutError(f"the card is of schema {quoted(document['schema'])}; this kvplan reads {SCHEMA!r}")
    name, layouts = document["name"], document["layouts"]
    check_name(name)
    if not isinstance(layouts, dict):
        raise LayoutError(f"the card's layouts are {quoted(layouts)}; they are a table")
    try:
        metadata = base64.b64decode(document["metadata"].encode("ascii"), validate=True)
    except (AttributeError, ValueError):
        raise LayoutError(f"the card's metadata is {quoted(document['metadata'])}; it is base64") from None
    budget = Budget()
    return name, {key: _layout(key, layout, budget) for key, layout in layouts.items()}, metadata


def check_name(name: object) -> None:
    """A name that can be told apart and printed.

    Raises:
        LayoutError: it is none.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= LIMITS.name_length or not name.isprintable():
        raise LayoutError(
            f"an agent, or its card, is called {quoted(name)}; a name is a printable text of 1 to "
            f"{LIMITS.name_length} characters"
        )


def _layout(name: str, document: Any, budget: Budget) -> KVLayout:
    if isinstance(document, dict) and "schema" not in document:
        raise LayoutError(f"layout {quoted(name)} of the card is a spec, if anything; it is what KVLayout.save writes")
    if not isinstance(document, dict):  # a text would be read as the path of a file here
        raise LayoutError(f"layout {quoted(name)} of the card is {quoted(document)}; it is what KVLayout.save writes")
    try:
        built = built_from_dump(document, budget)
    except LayoutError as error:
        raise LayoutError(f"layout {quoted(name)} of the card: {error}") from None
    layout = KVLayout(built)
    if layout.addresses != "dump":
        raise LayoutError(f"layout {quoted(name)} of the card is a spec: nothing lies at its addresses")
    return layout
