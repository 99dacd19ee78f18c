"""The demo: what it shows is true, and it can fail."""

import json
import sys
from functools import partial

import pytest

from kvplan.cli import demo, main

pytestmark = [pytest.mark.slow, pytest.mark.slow]

SMALL = ["--requests", "3", "--tokens", "48"]


@pytest.fixture
def run(monkeypatch):
    """Run the demo; ``tamper`` gets the pool between store and load."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*given, tamper=None):
        monkeypatch.setattr(demo, "run_demo", partial(demo.run_demo, tamper=tamper))
        return main(["demo", *SMALL, *given])

    return run


def check_facts(facts, *, equal=True):
    assert facts["schema"] == "kvplan.demo/2"
    assert facts["passed"] is equal
    assert facts["old_blocks_destroyed"]
    assert facts["num_requests"] == len(facts["requests"]) == 3
    cache, pool = facts["layouts"]["cache"], facts["layouts"]["pool"]
    assert (cache["block_tokens"], pool["block_tokens"]) == (16, 64)
    blocks, partly = 0, False
    for request in facts["requests"]:
        old, new, host = request["old_blocks"], request["new_blocks"], request["host_blocks"]
        assert len(old) == len(new) == -(-request["cached_tokens"] // 16)
        assert len(host) == -(-len(old) // 4)
        partly |= len(host) * 4 > len(old)
        blocks += len(old)
    assert partly  # a host block that is only partly used
    for side in ("old_blocks", "new_blocks", "host_blocks"):
        ids = [block for request in facts["requests"] for block in request[side]]
        assert len(set(ids)) == len(ids)
    olds = {block for request in facts["requests"] for block in request["old_blocks"]}
    assert olds.isdisjoint(block for request in facts["requests"] for block in request["new_blocks"])
    # A unit holds 4 layers of K and V, 16 tokens of 4 heads of 32 float32: 8 runs of 8192 bytes.
    assert facts["units"] == blocks
    assert facts["nbytes"] == blocks * 65536
    assert facts["descriptors"] == {"rows": blocks * 8 * 16 * 4, "before": blocks * 8, "after": blocks * 8}


@pytest.fixture(scope="module")
def engine():
    pytest.importorskip("transformers", minversion="5.23")


@pytest.mark.engine
@pytest.mark.usefixtures("engine")
def test_tokens_are_those_of_an_undisturbed_engine(run, capsys):
    assert run("--engine", "transformers", "--json") == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    check_facts(facts)
    assert err == ""
    assert (facts["engine"], facts["compared"], facts["missing"]) == ("transformers", "generated tokens", None)
    assert facts["control"] == {"requests_changed": 3}
    assert all(6 <= request["generated_before"] < 48 for request in facts["requests"])


@pytest.mark.engine
@pytest.mark.usefixtures("engine")
def test_what_is_lost_on_the_way_is_found(run, capsys):
    def lose_the_first_host_block(pool):
        pool.tensors[0] = 0

    assert run(tamper=lose_the_first_host_block) == 1
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("request ")][-3:] == ["NO", "yes", "yes"]
    assert lines[-1].startswith("FAIL: generated tokens are equal in only 2 of 3 requests")
    assert max(map(len, lines)) <= 80


def test_a_plain_demo_can_fail(run, capsys):
    def flip_one_bit(pool):
        pool.tensors.view("u1")[0, 3, 1, 5, 2, 7] ^= 1

    assert run("--engine", "numpy", "--json", tamper=flip_one_bit) == 1
    facts = json.loads(capsys.readouterr().out)
    check_facts(facts, equal=False)
    assert [request["equal"] for request in facts["requests"]] == [False, True, True]


@pytest.mark.engine
def test_without_the_engine_it_says_so_and_takes_arrays(run, capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run() == 0
    out, err = capsys.readouterr()
    assert err.startswith("kvplan: the engine cannot be imported (")
    assert "; this is the plain demo, on arrays. To install the engine, about 250 MB: pip install torch" in err
    assert "A cache of plain arrays" in out
    assert out.splitlines()[-1].startswith("PASS: bytes of the cache are equal in all 3 requests")
    assert max(map(len, out.splitlines())) <= 80
