"""The card of a process: its name, layouts and NIXL metadata as text, to send to a peer over any channel."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
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
_LAYOUT = "give what KVLayout.save writes"


def write(name: str, layouts: Mapping[str, KVLayout], metadata: bytes) -> bytes:
    """Make the card of a process."""
    document = {
        "schema": SCHEMA,
        "name": name,
        "layouts": {key: document_of(layout.built) for key, layout in layouts.items()},
        "metadata": base64.b64encode(metadata).decode(),
    }
    return json.dumps(document).encode()


def read_table(card: object, schema: str, keys: Sequence[str], right: str) -> dict[str, Any]:
    """Read the table of a card, of this kind or of another.

    Args:
        card: text of a process, as bytes or str.
        schema: the schema that the card must have.
        keys: the keys that the table must have.
        right: words of the message that tell what would be right.

    Raises:
        LayoutError: it is no table, lacks a key, or has another schema.

    >>> read_table(b'{"schema": "a/1", "name": "decode"}', "a/1", ("schema", "name"), "give a card")["name"]
    'decode'
    >>> read_table(b'{"schema": "a/2"}', "a/1", ("schema", "name"), "give a card")
    Traceback (most recent call last):
        ...
    kvplan.errors.LayoutError: the card has schema 'a/2'; this kvplan reads 'a/1'
    """
    if not isinstance(card, bytes | bytearray | str):
        raise LayoutError(f"card is a {type(card).__name__}; {right}")
    try:
        document = json_of(card if isinstance(card, str) else bytes(card))
    except LayoutError as error:
        raise LayoutError(f"the card cannot be read: {error}; {right}") from None
    if not isinstance(document, dict):
        raise LayoutError(f"the card is {quoted(document)}; {right}")
    if "schema" in document and document["schema"] != schema:
        raise LayoutError(f"the card has schema {quoted(document['schema'])}; this kvplan reads {schema!r}")
    if lacked := [key for key in keys if key not in document]:
        raise LayoutError(f"the card lacks {lacked[0]!r}; {right}")
    return document


def read(card: bytes) -> tuple[str, dict[str, KVLayout], bytes]:
    """Read name, layouts and NIXL's metadata from a card.

    Raises:
        LayoutError: the card cannot be read, or one of its layouts is invalid.
    """
    document = read_table(card, SCHEMA, _KEYS, _RIGHT)
    name, layouts = document["name"], document["layouts"]
    check_name(name)
    if not isinstance(layouts, dict):
        raise LayoutError(f"the card's layouts are {quoted(layouts)}; give an object with a layout for each name")
    try:
        metadata = base64.b64decode(document["metadata"].encode("ascii"), validate=True)
    except (AttributeError, ValueError):
        raise LayoutError(f"the card's metadata is {quoted(document['metadata'])}; give base64 text") from None
    budget = Budget()
    return name, {key: read_layout(key, layout, budget) for key, layout in layouts.items()}, metadata


def check_name(name: object, what: str = "an agent, or of its card,") -> str:
    """Return a name; raise LayoutError if it is not a printable text of limited length.

    >>> check_name("decode-0")
    'decode-0'
    """
    if not isinstance(name, str) or not 1 <= len(name) <= LIMITS.name_length or not name.isprintable():
        raise LayoutError(
            f"the name of {what} is {quoted(name)}; give a printable text of 1 to {LIMITS.name_length} characters"
        )
    return name


def read_layout(name: str, document: Any, budget: Budget) -> KVLayout:
    """Return a layout of a card; raise LayoutError if it is not a dump, or is invalid."""
    if isinstance(document, dict) and "schema" not in document:
        raise LayoutError(f"layout {quoted(name)} of the card has no schema, as if it were a spec; {_LAYOUT}")
    if not isinstance(document, dict):  # otherwise a text would be read as the path of a file here
        raise LayoutError(f"layout {quoted(name)} of the card is {quoted(document)}; {_LAYOUT}")
    try:
        built = built_from_dump(document, budget)
    except LayoutError as error:
        raise LayoutError(f"layout {quoted(name)} of the card: {error}") from None
    layout = KVLayout(built)
    if layout.addresses != "dump":
        raise LayoutError(f"layout {quoted(name)} of the card is a spec: its addresses hold no memory")
    return layout
