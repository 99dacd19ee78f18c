"""The numbers of an engine's answer, and their medians over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from benchmarks.engines.ways import NO_OFFLOADING

# Columns of a measure that are times or rates, in the order of tables, and their units.
UNITS = {
    "ttft_p50": "ms", "ttft_p99": "ms", "itl_p50": "ms", "itl_p90": "ms", "itl_p99": "ms", "quiet_p50": "ms",
    "quiet_p99": "ms", "cpu": "ms", "tokens_s": "tokens/s", "cpu_s": "s",
}  # fmt: skip
SLOW = 1.1  # a request or a round whose pace is longer than the run's by this factor is left out


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
    if measure == "alone":
        found["cpus"] = [round(1e3 * value, 3) for value in answer["cpus"]]
        found["cpu"] = round(statistics.fmean(found["cpus"]), 4)
    if measure == "beside":
        found["cpu"] = round(1e3 * answer["cpu"] / max(len(answer["ttft"]), 1), 4)
    if "mean_pace" in answer:
        found["mean_pace"] = round(1e6 * answer["mean_pace"], 3)
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


class Steady(NamedTuple):
    """The samples of a run without what came while the CPU was slow.

    Attributes:
        samples: the samples.
        requests: number of requests alone that were left out.
        of_requests: number of requests alone whose pace is known.
        rounds: number of rounds of several requests that were left out.
        of_rounds: number of such rounds whose pace is known.
    """

    samples: list[Mapping[str, Any]]
    requests: int
    of_requests: int
    rounds: int
    of_rounds: int

    def __str__(self) -> str:
        """Say what was left out.

        >>> print(Steady([], 2, 1200, 1, 8))
        2 of 1,200 requests and 1 of 8 rounds of several requests
        """
        found = f"{self.requests:,} of {self.of_requests:,} requests"
        return found + (f" and {self.rounds:,} of {self.of_rounds:,} rounds of several requests" * (self.of_rounds > 0))


def steady(samples: Sequence[Mapping[str, Any]]) -> Steady:
    """Leave out the requests that came while the CPU was slow; the launches of a step bind their time.

    The pace of a run is that of its quickest tenth, over all engines. A round without a request at this pace has no
    time to the first token and no CPU time. A round of several requests has one pace, the mean of its steps', and is
    left out or kept as a whole.

    >>> quick = {"ttft": [30.0, 45.0, 32.0], "pace": [1.0, 1.5, 1.05], "cpus": [31.0, 47.0, 34.0], "ttft_p50": 32.0}
    >>> slow = {"ttft": [50.0], "pace": [1.6], "ttft_p50": 50.0, "ttft_p99": 50.0, "cpu": 7.0}
    >>> found = steady([quick, slow, {"mean_pace": 1.0, "cpu": 5.0}, {"mean_pace": 1.2, "cpu": 6.0}])
    >>> [{name: one[name] for name in ("ttft_p50", "ttft_p99", "cpu") if name in one} for one in found.samples]
    [{'ttft_p50': 30.0, 'ttft_p99': 32.0, 'cpu': 32.5}, {'cpu': 7.0}, {'cpu': 5.0}]
    >>> str(found)
    '2 of 4 requests and 1 of 2 rounds of several requests'
    """
    paces = [pace for sample in samples for pace in sample.get("pace", ())]
    most = SLOW * percentile(paces, 0.1) if paces else 0.0
    means = [sample["mean_pace"] for sample in samples if "mean_pace" in sample]
    most_mean = SLOW * percentile(means, 0.1) if means else 0.0
    found = list[Mapping[str, Any]]()
    for sample in samples:
        if "pace" in sample:
            found.append(_at_pace(sample, most))
        elif sample.get("mean_pace", 0.0) <= most_mean:
            found.append(sample)
    slow, rounds = (sum(pace > limit for pace in given) for given, limit in ((paces, most), (means, most_mean)))
    return Steady(found, slow, len(paces), rounds, len(means))


def _at_pace(sample: Mapping[str, Any], most: float) -> dict[str, Any]:
    """Return a sample of requests alone without those that were slower than a pace."""
    quick = [pace <= most for pace in sample["pace"]]
    times = list(compress(sample["ttft"], quick))
    found = {f"ttft_p{share}": percentile(times, share / 100) for share in (50, 99)} if times else {}
    gone = {"ttft_p50", "ttft_p99"}
    if "cpus" in sample:  # records from before have the mean of all requests only
        gone.add("cpu")
        found |= {"cpu": statistics.fmean(compress(sample["cpus"], quick))} if times else {}
    return {name: value for name, value in sample.items() if name not in gone} | found


def summary(samples: Sequence[Mapping[str, Any]]) -> dict[Key, dict[str, Spread]]:
    """Return every figure of a run over its rounds, by what it is of and by column; see :func:`steady`."""
    rounds: dict[Key, dict[str, list[float]]] = {}
    for sample in steady(samples).samples:
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
