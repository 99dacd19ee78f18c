"""Prefill in one whole vLLM, decode in another: the tokens of one engine, by NIXL alone and by kvplan's chunks."""

from __future__ import annotations

import pytest

from tests.whole_engines.install import RELEASE, installed
from tests.whole_engines.model import write
from tests.whole_engines.work import ANSWERED, BLOCK, tokens
from tests.whole_pairs.pair import pair

pytestmark = [pytest.mark.engines, pytest.mark.slow]

PACKED = {"KVPLAN_NIXL": "1", "KVPLAN_NIXL_PACKED": "always"}
AUTO = {"KVPLAN_NIXL": "1"}
ALONE: dict[str, str] = {}  # NIXL without kvplan
FALLBACK = "NIXL moves a transfer with"
PROMPTS = [tokens("through two engines", k, 300 + 37 * k) for k in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("nixl", reason="tests/whole_engines/install.py installs NIXL")
    if "cpu" not in (installed() or "") or not (installed() or "").startswith(RELEASE):
        pytest.skip(f"needs vLLM {RELEASE} for CPUs: make test-engines")
    return str(write(tmp_path_factory.mktemp("pair") / "model"))


@pytest.mark.parametrize(
    ("prefill", "decode", "packed"),
    [(ALONE, ALONE, False), (PACKED, PACKED, True), (AUTO, AUTO, None), (ALONE, PACKED, False), (PACKED, ALONE, False)],
    ids=["nixl alone", "packed", "auto", "the owner without kvplan", "the reader without kvplan"],
)
def test_the_tokens_are_those_of_one_engine(prefill, decode, packed, model, tmp_path):
    with pair(model, tmp_path, {"prefill": prefill, "decode": decode}) as both:
        in_vain = both.meet()
        hits = in_vain // 2 * BLOCK
        for number, prompt in enumerate(PROMPTS, 2):
            given = both.through(prompt, ANSWERED)
            right = both.prefill.ask(prompt=prompt, count=ANSWERED)
            assert given["tokens"] == right["tokens"]
            assert given["failed"] == in_vain // 2  # only those before the meeting
            assert right["packed"] == 0  # the reader asks
            assert given["packed"] == (number if packed else 0) or packed is None
            hits += len(prompt) - 1  # vLLM computes the last token of a prompt
            assert given["hits"] >= hits
        told = [both.prefill.end(in_vain), both.decode.end()]
        assert [one["agent"].startswith("kvplan.") for one in told] == [bool(prefill), bool(decode)]
        assert [one["used blocks"] for one in told] == [in_vain, 0]
        log = both.decode.log()
        assert ("packed into few large messages" in log) == bool(prefill and decode)
        assert not packed or FALLBACK not in log


@pytest.mark.parametrize("env", [ALONE, PACKED], ids=["nixl alone", "packed"])
def test_an_owner_that_dies_costs_its_reader_no_token(env, model, tmp_path):
    """The load fails, and the reader computes the prompt."""
    with pair(model, tmp_path, {"prefill": env, "decode": env}) as both:
        right = both.prefill.ask(prompt=PROMPTS[1], count=ANSWERED)["tokens"]
        both.meet()
        params = both.computed(PROMPTS[1])
        both.prefill.started.kill()
        both.prefill.started.wait()
        given = both.decode.ask(prompt=PROMPTS[1], count=ANSWERED, params=params)
        assert given["tokens"] == right
        assert both.decode.ask(prompt=PROMPTS[1], count=ANSWERED)["tokens"] == right
        assert both.decode.end()["used blocks"] == 0
