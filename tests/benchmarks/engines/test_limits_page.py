"""The table of limits over recorded runs: in how many each holds, and the run with the most room."""

from __future__ import annotations

import json

from benchmarks.engines.limits_page import limits, met


def row(what, ours, limit, *, ok, more=False, rule="0.9 x the best", unit="ms"):
    return {"what": what, "ours": ours, "limit": limit, "rule": rule, "unit": unit, "more_is_better": more, "ok": ok}


def test_each_limit_counts_its_runs_and_shows_the_one_with_the_most_room(tmp_path):
    runs = {
        "first.json": [row("TTFT", 9.0, 10.0, ok=True),
                       row("chats", 90.0, 100.0, ok=False, more=True, unit="tokens/s")],
        "second.json": [row("TTFT", 8.0, 10.0, ok=True), row("TTFT", 12.0, 10.0, ok=False, rule="another"),
                        row("chats", 80.0, 100.0, ok=False, more=True, unit="tokens/s")],
        "third.json": [row("TTFT", 30.0, 20.0, ok=False), row("CPU", 1.0, None, ok=None),
                       row("spread", 1.0, 2.0, ok=None)],
    }  # fmt: skip
    for name, rows in runs.items():
        (tmp_path / name).write_text(json.dumps({"rows": rows}))
    results = [tmp_path / name for name in runs]
    assert [(one.row["what"], one.run.name, round(one.room, 2)) for one in met(results)] == [
        ("TTFT", "first.json", 0.1), ("chats", "first.json", -0.1), ("TTFT", "second.json", 0.2),
        ("TTFT", "second.json", -0.2), ("chats", "second.json", -0.2), ("TTFT", "third.json", -0.5),
    ]  # fmt: skip
    place = "../results/engines"
    assert limits(results).splitlines()[3:-1] == [
        f"| TTFT | 0.9 x the best | 2 of 3 | [8.00 ms, 10.0 ms]({place}/second.json) |",
        f"| TTFT | another | 0 of 1 | [12.0 ms, 10.0 ms]({place}/second.json) |",
        f"| chats | 0.9 x the best | 0 of 2 | [90.0 tokens/s, 100 tokens/s]({place}/first.json) |",
    ]
