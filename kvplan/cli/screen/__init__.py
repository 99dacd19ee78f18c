"""Print answers: JSON documents with their schemas, tables, pictures and progress bars."""

from __future__ import annotations

from kvplan.cli.screen.documents import SCHEMAS, print_json, schema_of

__all__ = ["SCHEMAS", "print_json", "schema_of"]
