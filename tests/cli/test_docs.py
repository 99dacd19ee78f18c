"""docs/reference/cli.md names every key of every document; tests/docs/test_blocks.py runs its commands."""

from __future__ import annotations

import pytest

from tests.commands import GPU, HOST, ROOT, document

TEXT = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "argv",
    [("inspect", GPU), ("plan", GPU, HOST, "--src", "0", "--dst", "0"), ("explain", GPU, HOST), ("backends",)],
    ids=lambda argv: argv[0],
)
def test_every_key_is_documented(capsys, argv):
    facts = document(capsys, *argv)
    section = TEXT[TEXT.index(f"\n`{facts['schema']}`") :]
    assert not [key for key in facts if key != "schema" and f"`{key}`" not in section]
