"""The numbers of an engine's answer, and their medians over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.engines.ways import NO_OFFLOADING

# Columns of a measure that are times or rates, in the order of tables, and their units.
UNITS = {
    "ttft_p50": "ms", "ttft_p99": "ms", "itl_p50": "ms", "itl_p90": "ms", "itl_p99": "ms", "quiet_p50": "ms",
    "quiet_p99": "ms", "cpu": "ms", "tokens_s": "tokens/s", "cpu_s": "s",
}  # fmt: skip
SLOW = 1.1  # a request whose pace is longer than the run's by this factor is left out
FACTS = ("cached", "local", "tokens")  # of a sample; equal in every way, where all is right


class Key(NamedTuple):
    """What a figure is of."""

    shape: str
    measure: str
    held: int
    suffix: int
    batch: int
    way: str


class Spread(NamedTuple):
    """A figure over the rounds of a run."""

    median: float
    least: float
    most: float
    rounds: int


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of all values do not exceed.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5), percentile([3.0, 1.0, 2.0, 4.0], 0.99), percentile([7.0], 0.5)
    (2.0, 4.0, 7.0)
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def columns(measure: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of one answer: times in ms, CPU time in ms per hit, and tokens per second.

    >>> columns("resident", {"ttft": [0.02, 0.03, 0.025], "local": [16, 16, 0]})
    {'ttft_p50': 25.0, 'ttft_p99': 30.0, 'ttft': [20.0, 30.0, 25.0], 'local': [0, 16]}
    """
    found: dict[str, Any] = {}
    for name in ("ttft", "itl", "quiet"):
        values = [1e3 * value for value in answer.get(name, ())]
        shares = {"ttft": (50, 99), "itl": (50, 90, 99), "quiet": (50, 99)}[name]
        found |= {f"{name}_p{share}": round(percentile(values, share / 100), 4) for share in shares if values}
    if measure in ("alone", "beside"):
        found["cpu"] = round(1e3 * answer["cpu"] / max(len(answer["ttft"]), 1), 4)
    if measure == "beside":
        found |= {"tokens_s": round(answer["tokens"] / answer["seconds"], 2), "unserved": answer["unserved"]}
    if measure == "chats":
        found |= {"tokens_s": round(answer["answered"] / answer["seconds"], 2), "cpu_s": round(answer["cpu"], 4),
                  "cached_share": round(answer["cached"] / answer["prompted"], 4),
                  "steps": kinds_of_steps(answer["steps"])}  # fmt: skip
    else:
        found["ttft"] = [round(1e3 * value, 3) for value in answer["ttft"]]
        if "pace" in answer:
            found["pace"] = [round(1e3 * value, 4) for value in answer["pace"]]
    for name in ("cached", "local"):
        if isinstance(answer.get(name), list) and answer[name]:
            found[name] = [min(answer[name]), max(answer[name])]
    if "tokens" in answer and measure == "alone":
        found["tokens"] = answer["tokens"]
    return found


def kinds_of_steps(steps: Iterable[tuple[int, int, float]]) -> dict[str, list[float]]:
    """Return number, total ms and median ms of steps that only decode, that compute prompts, and that are empty.

    Args:
        steps: tokens, requests and seconds of each step.

    >>> kinds_of_steps([(16, 16, 0.008), (528, 17, 0.02), (16, 16, 0.01), (0, 0, 0.001)])
    {'decode': [2, 18.0, 8.0], 'prefill': [1, 20.0, 20.0], 'empty': [1, 1.0, 1.0]}
    """
    kinds: dict[str, list[float]] = {"decode": [], "prefill": [], "empty": []}
    for tokens, requests, seconds in steps:
        kind = "empty" if not tokens else "decode" if tokens == requests else "prefill"
        kinds[kind].append(1e3 * seconds)
    return {
        kind: [len(times), round(sum(times), 2), round(percentile(times, 0.5), 3)]
        for kind, times in kinds.items()
        if times
    }


def spread(values: Sequence[float]) -> Spread:
    """Return the median, the least and the most of some rounds.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, least=1.0, most=3.0, rounds=3)
    """
    return Spread(statistics.median(values), min(values), max(values), len(values))


def steady(samples: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], int, int]:
    """Leave out the requests that came while the CPU was slow; the launches of a step bind their time.

    The pace of a run is that of its quickest tenth, over all engines. A round without a request at this pace has no
    time to the first token.

    Returns:
        The samples; the number of requests that were left out; and of all whose pace is known.

    >>> quick = {"ttft": [30.0, 45.0, 32.0], "pace": [1.0, 1.5, 1.05], "ttft_p50": 32.0, "ttft_p99": 45.0}
    >>> slow = {"ttft": [50.0], "pace": [1.6], "ttft_p50": 50.0, "ttft_p99": 50.0, "cpu": 7.0}
    >>> (one, other), left_out, known = steady([quick, slow])
    >>> one["ttft_p50"], one["ttft_p99"], {"ttft_p50", "ttft_p99", "cpu"} & other.keys(), left_out, known
    (30.0, 32.0, {'cpu'}, 2, 4)
    """
    paces = [pace for sample in samples for pace in sample.get("pace", ())]
    most = SLOW * percentile(paces, 0.1) if paces else 0.0
    found = list[Mapping[str, Any]]()
    for sample in samples:
        if "pace" in sample:
            kept = [time for time, pace in zip(sample["ttft"], sample["pace"], strict=True) if pace <= most]
            others = {name: value for name, value in sample.items() if name not in ("ttft_p50", "ttft_p99")}
            shares = {f"ttft_p{share}": percentile(kept, share / 100) for share in (50, 99)} if kept else {}
            found.append(others | shares)
        else:
            found.append(sample)
    return found, sum(pace > most for pace in paces), len(paces)


def summary(samples: Sequence[Mapping[str, Any]]) -> dict[Key, dict[str, Spread]]:
    """Return every figure of a run over its rounds, by what it is of and by column; see :func:`steady`."""
    rounds: dict[Key, dict[str, list[float]]] = {}
    for sample in steady(samples)[0]:
        key = Key(*(sample[name] for name in Key._fields))
        kept = rounds.setdefault(key, {})
        for column in UNITS:
            if column in sample:
                kept.setdefault(column, []).append(sample[column])
    return {key: {column: spread(values) for column, values in kept.items()} for key, kept in rounds.items()}


def faults(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return, as sentences, where a hit was not a hit: tokens that came from elsewhere, or had to be computed.

    >>> faults([{"shape": "8b", "way": "own", "measure": "alone", "held": 640, "suffix": 1, "round": 0,
    ...          "cached": [0, 640], "local": [0, 0]}])
    ['8b, own, alone 640 + 1, round 0: cached tokens 0 to 640, expected 640']
    """
    found = []
    for one in samples:
        where = f"{one['shape']}, {one['way']}, {one['measure']} {one['held']} + {one['suffix']}, round {one['round']}"
        least, most = one.get("cached", (one["held"], one["held"]))
        expected = 0 if one["way"] == NO_OFFLOADING else one["held"]
        hits = one["measure"] in ("alone", "beside")
        if hits and "cached" in one and (least, most) != (expected, expected):
            found.append(f"{where}: cached tokens {least} to {most}, expected {expected}")
        local = one.get("local", (0, 0))
        if hits and local[1]:
            found.append(f"{where}: the GPU's own cache held up to {local[1]} tokens, expected 0")
        if one["measure"] == "resident" and local[0] < one["held"]:
            found.append(f"{where}: the GPU's own cache held {local[0]} tokens, expected {one['held']}")
        if one.get("unserved"):
            found.append(f"{where}: {one['unserved']} hits were not served in time")
    return found


def different_tokens(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return, as sentences, which ways' first tokens are not those of most ways, for hits alone."""
    groups: dict[tuple[Any, ...], dict[str, list[int]]] = {}
    for one in samples:
        if one["measure"] == "alone":
            place = (one["shape"], one["held"], one["suffix"], one["round"])
            groups.setdefault(place, {})[one["way"]] = one["tokens"]
    counts: dict[str, list[int]] = {}
    for (shape, *_), ways in groups.items():
        for k in range(max(map(len, ways.values()))):
            given = {way: tokens[k] for way, tokens in ways.items() if k < len(tokens)}
            usual = statistics.mode(given.values())
            for way, token in given.items():
                count = counts.setdefault(f"{shape}, {way}", [0, 0])
                count[0] += token != usual
                count[1] += 1
    return [
        f"{who}: {wrong} of {all_} first tokens differ from most ways'"
        for who, (wrong, all_) in counts.items()
        if wrong
    ]
