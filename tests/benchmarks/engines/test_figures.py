"""Figures of whole engines: medians, tables, what is wrong with hits, and the limits."""

from __future__ import annotations

import json

import pytest

from benchmarks.engines import required, rows
from benchmarks.engines.columns import Spread, columns, different_tokens, faults, steady, summary
from benchmarks.record import table
from tests.benchmarks.engines.recorded import alone, sample


def test_a_figure_is_the_median_of_the_rounds():
    (key, found), = summary(alone("own", 35.0, 36.0, 50.0)).items()  # fmt: skip
    assert (key.way, key.held, key.suffix) == ("own", 6000, 512)
    assert found["ttft_p50"] == Spread(36.0, 35.0, 50.0, 3)


def test_requests_while_the_cpu_was_slow_are_left_out():
    """On a shared machine, one way's first tokens took from 24 to 46 ms within a round."""
    own, ours = alone("own", 35.0, 50.0), alone("kvplan-layers", 30.0)
    for one, times, paces in (
        (own[0], [35.0, 36.0, 52.0], [0.51, 0.5, 0.9]),
        (own[1], [50.0, 51.0], [0.8, 0.7]),
        (ours[0], [29.0, 47.0, 30.0], [0.5, 0.95, 0.54]),
    ):
        one |= {"ttft": times, "pace": paces}
    figures = {key.way: found for key, found in summary(own + ours).items()}
    assert figures["own"]["ttft_p50"] == Spread(35.0, 35.0, 35.0, 1)
    assert figures["own"]["cpu"].rounds == 2, "other figures of a round stay"
    assert figures["kvplan-layers"]["ttft_p50"].median == 29.0
    assert steady(own + ours)[1:] == (4, 8, 0, 0)
    old = alone("own", 35.0, 36.0)
    assert steady(old) == (old, 0, 0, 0, 0), "records from before have no pace"


def test_the_cpu_time_of_hits_is_that_of_hits_at_full_pace():
    quick, slow = alone("own", 35.0, 50.0)
    quick |= {"ttft": [35.0, 52.0, 36.0], "pace": [0.5, 0.9, 0.52], "cpus": [38.0, 60.0, 40.0], "cpu": 46.0}
    slow |= {"ttft": [50.0], "pace": [0.8], "cpus": [55.0], "cpu": 55.0}
    (found,) = summary([quick, slow]).values()
    assert found["cpu"] == Spread(39.0, 39.0, 39.0, 1)


def test_rounds_of_several_requests_while_the_cpu_was_slow_are_left_out():
    rounds = [sample("own", "chats", tokens_s=rate, mean_pace=pace) for rate, pace in ((2000.0, 20.0), (1600.0, 33.0))]
    rounds.append(sample("kvplan", "chats", tokens_s=2100.0, mean_pace=21.9))
    figures = {key.way: found["tokens_s"] for key, found in summary(rounds).items()}
    assert figures == {"own": Spread(2000.0, 2000.0, 2000.0, 1), "kvplan": Spread(2100.0, 2100.0, 2100.0, 1)}
    assert str(steady(rounds)) == "0 of 0 requests and 1 of 3 rounds of several requests"


def test_a_long_hit_without_a_request_at_full_pace_is_not_judged():
    quick = alone("kvplan-layers", 23.0)[0] | {"ttft": [23.0], "pace": [0.5]}
    slow = alone("kvplan-layers", 99.0)[0] | {"held": 28000, "ttft": [99.0], "pace": [0.9]}
    judged = required.judged([quick, slow], {"8b": {"link": 55e9}})
    assert not [row for row in judged if "28,000" in row.what]
    slow["pace"] = [0.5]
    judged = required.judged([quick, slow], {"8b": {"link": 55e9}})
    assert [row.ours for row in judged if "28,000" in row.what] == [99.0]


def test_answers_become_numbers():
    answer = {"ttft": [0.01, 0.03], "itl": [0.005] * 99 + [0.02], "quiet": [0.004], "tokens": 300, "seconds": 2.0,
              "cpu": 0.5, "steps": 7, "unserved": 0}  # fmt: skip
    found = columns("beside", answer)
    assert (found["ttft_p50"], found["ttft_p99"], found["itl_p99"], found["quiet_p50"]) == (10.0, 30.0, 5.0, 4.0)
    assert (found["tokens_s"], found["cpu"]) == (150.0, 250.0)


def test_no_hit_in_flight_has_no_figure():
    answer = {"ttft": [0.01], "itl": [], "quiet": [0.004], "tokens": 1, "seconds": 1, "cpu": 0.1, "unserved": 0}
    assert "itl_p50" not in columns("beside", answer)


def test_chats_count_answers_per_second():
    answer = {"ttft": [0.01], "cached": 900, "prompted": 1000, "answered": 64, "seconds": 2.0, "cpu": 1.25,
              "steps": [(4, 4, 0.01), (132, 5, 0.03)]}  # fmt: skip
    found = columns("chats", answer)
    assert found["steps"] == {"decode": [1, 10.0, 10.0], "prefill": [1, 30.0, 30.0]}
    assert (found["tokens_s"], found["cpu_s"], found["cached_share"]) == (32.0, 1.25, 0.9)


def test_hits_that_are_no_hits_are_told():
    samples = alone("own", 35.0)
    assert faults(samples) == []
    samples[0]["local"] = [0, 4096]
    samples += [sample("own", "resident", local=[0, 6000]), sample("own", "beside", unserved=2)]
    told = faults(samples)
    assert [text.partition(": ")[2] for text in told] == [
        "the GPU's own cache held up to 4096 tokens, expected 0",
        "the GPU's own cache held 0 tokens, expected 6000",
        "2 hits were not served in time",
    ]


def test_without_offloading_nothing_is_cached():
    (one,) = alone("none", 130.0)
    assert len(faults([one])) == 1
    one["cached"] = [0, 0]
    assert faults([one]) == []


def test_a_way_with_other_tokens_is_told():
    samples = [*alone("own", 35.0), *alone("simple", 35.0), *alone("kvplan", 30.0)]
    assert different_tokens(samples) == []
    samples[2]["tokens"] = [1, 2, 9]
    assert different_tokens(samples) == ["8b, kvplan: 1 of 3 first tokens differ from most ways'"]


def test_fewer_hits_of_a_slow_way_are_compared_as_far_as_they_go():
    samples = [*alone("own", 35.0), *alone("none", 35.0)]
    samples[1]["tokens"] = [1]
    assert different_tokens(samples) == []


def test_tables_have_a_row_per_way_and_batch():
    samples = [*alone("own", 35.0, 36.0), *alone("kvplan-layers", 26.0), *alone("kvplan-layers", 27.0, batch=1),
               sample("own", "chats", tokens_s=500.0, cpu_s=1.0, ttft_p50=30.0)]  # fmt: skip
    text = rows.tables(samples, {"8b": {"link": 55e9}})
    assert "| *the bytes at the link's 55.0 GB/s* | 14.3 |" in text
    assert "| vLLM's OffloadingConnector (batch 1) | 35.5 (35.0 to 36.0) |" in text
    assert "| kvplan, by layer (batch 2) | 27.0 (27.0 to 27.0) |" in text
    assert "| | TTFT p50, ms | tokens/s | CPU time, s |" in text
    widths = [[line.count("|") for line in block.splitlines() if line.startswith("|")] for block in text.split("**")]
    assert all(len(set(counts)) <= 1 for counts in widths)


def test_rows_compare_within_a_batch():
    samples = [
        *alone("own", 40.0),
        *alone("kvplan", 30.0),
        *alone("own", 50.0, batch=1),
        *alone("kvplan", 35.0, batch=1),
    ]
    found = [row for row in rows.rows(summary(samples)) if "TTFT p50" in row.what]
    assert [(row.ours, dict(row.beside)) for row in found] == [
        (30.0, {"vLLM's OffloadingConnector": 40.0}),
        (35.0, {"vLLM's OffloadingConnector": 50.0}),
    ]


# ---- limits ----------------------------------------------------------------------------------------------------------


def judged(samples, link=0.0):
    return {row.what: row for row in required.judged(samples, {"8b": {"link": link}, "gqa1": {"link": link}})}


def test_alone_is_held_to_the_best_of_vllm():
    samples = [*alone("own", 40.0), *alone("own-packed-sync", 36.0), *alone("simple", 44.0), *alone("lmcache", 20.0),
               *alone("kvplan", 10.0), *alone("kvplan-layers", 26.0)]  # fmt: skip
    row = judged(samples)["8b: TTFT alone p50, by layer"]
    assert (row.ours, row.limit, row.ok) == (26.0, 27.0, True)
    assert dict(row.beside) == {"vLLM's OffloadingConnector, BLHNC, sync": 36.0}


def test_the_worst_batch_counts():
    samples = [*alone("own", 40.0), *alone("kvplan-layers", 26.0), *alone("own", 36.0, batch=1),
               *alone("kvplan-layers", 28.0, batch=1)]  # fmt: skip
    row = judged(samples)["8b: TTFT alone p50, by layer"]
    assert (row.ours, row.limit, row.ok, row.detail["batch"]) == (28.0, 27.0, False, 1)


def test_other_suffixes_hold_no_limit():
    assert judged([*alone("own", 40.0, suffix=1), *alone("kvplan-layers", 39.0, suffix=1)]) == {}


def test_beside_decoding_sync_and_async_have_limits_of_their_own():
    samples = [sample(way, "beside", ttft_p50=ttft, itl_p90=p90, itl_p99=p99, cpu=1.0) for way, ttft, p90, p99 in (
        ("own", 55.0, 9.0, 12.0), ("own-sync", 38.0, 20.0, 24.0), ("simple-packed", 50.0, 8.0, 11.0),
        ("kvplan", 49.0, 8.0, 11.5), ("kvplan-layers", 29.0, 17.5, 19.0))]  # fmt: skip
    found = [row for row in required.judged(samples, {}) if "beside" in row.what]
    assert [(row.limit, row.ok) for row in found] == [(pytest.approx(0.80 * 38.0), True), (pytest.approx(27.5), False)]
    tokens = judged(samples)
    assert tokens["8b: ITL of others p99, async"].limit == pytest.approx(1.05 * 11.0)
    assert tokens["8b: ITL of others p99, async"].ours == 11.5
    assert tokens["8b: ITL of others p90, by layer"].ok is False


def test_chats_take_kvplan_s_best_way():
    rates = {"own": (500.0, 2.0), "simple": (480.0, 1.8), "kvplan": (530.0, 1.7), "kvplan-layers": (560.0, 1.9)}
    samples = [sample(way, "chats", tokens_s=rate, cpu_s=cpu) for way, (rate, cpu) in rates.items()]
    found = judged(samples)
    row = found["8b: chats"]
    assert (row.ours, row.ok, row.detail["way"]) == (560.0, True, "kvplan-layers")
    assert row.limit == pytest.approx(550.0)
    assert found["8b: CPU time of chats"].ok is True


def test_the_spread_is_held_to_that_of_the_best():
    samples = [*alone("own", 40.0, 42.0), *alone("own-sync", 50.0, 60.0), *alone("kvplan-layers", 26.0, 28.3)]
    row = judged(samples)["8b: spread of TTFT alone p50, by layer"]
    assert (row.ours, row.limit, row.ok) == (pytest.approx(2.3), pytest.approx(2.2), False)


@pytest.mark.parametrize(("shape", "limit"), [("8b", 66.7 + 15), ("gqa1", 70.0 + 10)])
def test_a_long_prefix_is_held_to_the_link_or_to_the_compute(shape, limit):
    samples = [*alone("kvplan-layers", 79.0, shape=shape, held=28000),
               sample("kvplan-layers", "resident", shape=shape, held=28000, ttft_p50=70.0)]  # fmt: skip
    (row,) = [row for row in required.judged(samples, {shape: {"link": 55e9}}) if "28,000" in row.what]
    assert row.limit == pytest.approx(limit, abs=0.1)
    assert row.ok is True


def test_judging_a_file(tmp_path, capsys):
    samples = [*alone("own", 40.0), *alone("kvplan-layers", 31.0)]
    made = {"samples": samples, "facts": {}, "traces": [], "rows": []}
    rows.save(tmp_path / "made.json", made)
    assert json.loads((tmp_path / "made.json").read_text()) == made
    assert required.main([str(tmp_path / "made.json")]) == 1
    printed = capsys.readouterr().out
    assert "8b: TTFT alone p50, by layer" in printed
    assert "NO" in printed
    assert required.main([]) == 2


def test_a_file_without_some_figures_says_so(tmp_path, capsys):
    """A way that died has no row, and its limits must not seem to hold."""
    samples = [*alone("own", 40.0), *alone("kvplan", 29.0)]
    rows.save(tmp_path / "made.json", {"samples": samples, "facts": {}})
    assert required.main([str(tmp_path / "made.json")]) == 0
    told = capsys.readouterr().err
    assert "not measured: 8b: TTFT alone p50, by layer, against the best of vLLM's ways" in told
    assert "not measured: 8b: TTFT alone p50, by layer, of a long prefix" in told
    assert "gqa1" not in told


def test_hits_that_were_none_fail_a_file(tmp_path, capsys):
    samples = [*alone("own", 40.0), *alone("kvplan-layers", 20.0)]
    samples[-1]["cached"] = [0, 6000]
    rows.save(tmp_path / "made.json", {"samples": samples, "facts": {}})
    assert required.main([str(tmp_path / "made.json")]) == 1
    assert "cached tokens 0 to 6000" in capsys.readouterr().out


def test_hits_beside_decoding_are_checked_too():
    right = sample("own", "beside", cached=[6000, 6000], local=[0, 0])
    assert faults([right, sample("none", "beside", cached=[0, 0], local=[0, 0]), sample("own", "beside")]) == []
    (said,) = faults([right | {"local": [0, 6000]}])
    assert said.endswith("the GPU's own cache held up to 6000 tokens, expected 0")


def test_limits_print_as_a_table():
    assert table(required.judged([*alone("own", 40.0), *alone("kvplan-layers", 29.0)], {})).startswith("must reach")
