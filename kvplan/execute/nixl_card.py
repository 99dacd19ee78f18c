"""The card of a process that NIXL reaches: its layouts, and what NIXL must know, as text that goes over any channel."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from kvplan.dump import document_of
from kvplan.errors import LayoutError
from kvplan.layout import KVLayout

SCHEMA = "kvplan.nixl/1"


def write(name: str, layouts: Mapping[str, KVLayout], metadata: bytes) -> bytes:
    """The card of a process."""
    document = {
        "schema": SCHEMA,
        "name": name,
        "layouts": {key: document_of(layout) for key, layout in layouts.items()},
        "metadata": base64.b64encode(metadata).decode(),
    }
    return json.dumps(document).encode()


def read(card: bytes) -> tuple[str, dict[str, KVLayout], bytes]:
    """Name, layouts and NIXL's metadata of a card.

    Raises:
        LayoutError: what is no card, or holds a layout that cannot be.
    """
    try:
        document = json.loads(card)
        schema, name, layouts = document["schema"], document["name"], document["layouts"]
        metadata = base64.b64decode(document["metadata"].encode(), validate=True)
    except (TypeError, KeyError, AttributeError, UnicodeDecodeError, json.JSONDecodeError, binascii.Error) as error:
        raise LayoutError(
            f"that is no card: {type(error).__name__}: {error}; give what NixlAgent.card() made"
        ) from error
    if schema != SCHEMA:
        raise LayoutError(f"the card is of schema {schema!r}; this kvplan reads {SCHEMA!r}")
    if not isinstance(name, str) or not isinstance(layouts, dict):
        raise LayoutError(f"the card is of {name!r} with layouts {layouts!r}; it has a text and a mapping")
    return name, {key: _layout(key, layout) for key, layout in layouts.items()}, metadata


def _layout(name: str, document: Any) -> KVLayout:
    if not isinstance(document, dict):  # a text would be read as the path of a file here
        raise LayoutError(f"layout {name!r} of the card is {document!r}; it is what KVLayout.save writes")
    layout = KVLayout.from_spec(document)
    if layout.addresses != "dump":
        raise LayoutError(f"layout {name!r} of the card is a spec: nothing lies at its addresses")
    return layout
