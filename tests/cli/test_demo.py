"""The demo: what it shows is true, and it can fail."""

import json
import sys
from functools import partial

import pytest

from kvplan.cli import demo, main

pytestmark = [pytest.mark.slow, pytest.mark.slow]


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the demo with three requests, and return its exit code, its answer and its notes."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *argv: (main(["demo", "--requests", "3", "--tokens", "48", *argv]), *capsys.readouterr())


@pytest.mark.engine
def test_tokens_are_those_of_an_undisturbed_engine_and_what_is_lost_is_found(run, monkeypatch):
    pytest.importorskip("transformers", minversion="5.23")
    from kvplan.engines import transformers as adapter

    code, out, err = run("--engine", "transformers", "--json")
    facts = json.loads(out)
    assert (code, err, facts["engine"], facts["compared"]) == (0, "", "transformers", "generated tokens")
    assert [facts["passed"], facts["transfers"] >= 2, len(facts["requests"])] == [True, True, 3]
    offload = adapter.offload

    def losing(manager, **options):
        moving = offload(manager, **options)
        restore = moving.restore_scheduled_requests

        def lose(requests):
            moving.pool.tensors.zero_()
            restore(requests)

        moving.restore_scheduled_requests = lose
        return moving

    monkeypatch.setattr(adapter, "offload", losing)
    code, out, _ = run()
    lines = out.splitlines()
    assert (code, max(map(len, lines)) <= 80) == (1, True)
    assert lines[-1].startswith("FAIL: generated tokens are equal in only")


def test_a_plain_demo_can_fail(run, monkeypatch):
    def flip_one_bit(pool):
        pool.tensors.view("u1")[0, 3, 1, 5, 2, 7] ^= 1

    monkeypatch.setattr(demo, "run_arrays", partial(demo.run_arrays, tamper=flip_one_bit))
    code, out, _ = run("--engine", "numpy", "--json")
    facts = json.loads(out)
    assert (code, facts["passed"]) == (1, False)
    assert [request["equal"] for request in facts["requests"]] == [False, True, True]
    blocks = {side: [block for request in facts["requests"] for block in request[f"{side}_blocks"]]
              for side in ("old", "new", "host")}  # fmt: skip
    assert all(len(set(ids)) == len(ids) for ids in blocks.values())
    assert not set(blocks["old"]) & set(blocks["new"])
    # A block holds 4 layers of K and V, 16 tokens of 4 heads of 32 float32: 64 KiB, there and back.
    assert (facts["transfers"], facts["nbytes"]) == (2, 2 * len(blocks["old"]) << 16)


@pytest.mark.engine
def test_without_the_engine_it_says_so_and_takes_arrays(run, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = run()
    assert err.startswith("kvplan: the engine cannot be imported (")
    assert (code, "A cache of plain arrays" in out) == (0, True)
    assert out.splitlines()[-1].startswith("PASS: bytes of the cache are equal in all 3 requests")
