"""Every call that is refused, through public names: one check of all rows. `table.py` says what a row is.

To add one, write a line into the room it belongs to; `pytest tests/contract/refusals -k describe` runs a part.
"""

from __future__ import annotations

from importlib import import_module

import pytest

from kvplan import KVPlanError
from tests.contract.refusals.table import LINE, MOST, REFUSED, UsageError

ROOMS = "layouts files programs memory execute agents attention vllm_and_sglang engines commands"
for room in ROOMS.split():
    import_module(f"tests.contract.refusals.{room}")


@pytest.mark.parametrize(
    ("call", "error", "words"), [pytest.param(*row, id=f"{name}: {row[-1]}"[:120]) for name, *row in REFUSED.rows]
)
def test_a_refusal_says_what_is_wrong(call, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KVPlanError) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert not [fragment for fragment in words.split(" ... ") if fragment not in message], message
    assert len(message) <= (LINE if error is UsageError else MOST)
