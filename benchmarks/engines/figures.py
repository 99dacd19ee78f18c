"""The numbers of an engine's answer, their medians over the rounds, and what is wrong with them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from benchmarks.engines.ways import NO_OFFLOADING, way_of
from benchmarks.record import Row

SLOW = 1.1  # a request or a round whose pace is longer than the run's by this factor is left out
LINK = "the bytes at the link"
Sample = Mapping[str, Any]


class Column(NamedTuple):
    """A number of a measure."""

    words: str
    unit: str


COLUMNS = {
    "ttft_p50": Column("TTFT p50", "ms"),
    "ttft_p99": Column("TTFT p99", "ms"),
    "itl_p50": Column("ITL p50", "ms"),
    "itl_p99": Column("ITL p99", "ms"),
    "cpu": Column("CPU time per hit", "ms"),
    "tokens_s": Column("tokens/s", "tokens/s"),
    "cpu_s": Column("CPU time", "s"),
}


class Key(NamedTuple):
    """What a figure is of."""

    shape: str
    measure: str
    held: int
    suffix: int
    way: str

    @property
    def words(self) -> str:
        """What was measured.

        >>> Key("8b", "beside", 6000, 512, "own").words, Key("8b", "chats", 0, 0, "own").words
        ('beside decoding, 6,000 held + 512 new', 'chats')
        """
        measure = {"beside": "beside decoding", "resident": "prefix on the GPU"}.get(self.measure, self.measure)
        return f"{measure}, {self.held:,} held + {self.suffix} new" if self.held else measure


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
    for name in ("ttft", "itl"):
        if values := [1e3 * value for value in answer.get(name, ())]:
            found |= {f"{name}_p{share}": round(percentile(values, share / 100), 4) for share in (50, 99)}
    if measure == "alone":
        found["cpus"] = [round(1e3 * value, 3) for value in answer["cpus"]]
        found |= {"cpu": round(statistics.fmean(found["cpus"]), 4), "tokens": answer["tokens"]}
    if measure == "beside":
        found["cpu"] = round(1e3 * answer["cpu"] / max(len(answer["ttft"]), 1), 4)
        found |= {"tokens_s": round(answer["tokens"] / answer["seconds"], 2), "unserved": answer["unserved"]}
    if measure == "chats":
        found |= {"tokens_s": round(answer["answered"] / answer["seconds"], 2), "cpu_s": round(answer["cpu"], 4),
                  "cached_share": round(answer["cached"] / answer["prompted"], 4)}  # fmt: skip
    else:
        found["ttft"] = [round(1e3 * value, 3) for value in answer["ttft"]]
    if "pace" in answer:
        found["pace"] = [round(1e3 * value, 4) for value in answer["pace"]]
    if "mean_pace" in answer:
        found["mean_pace"] = round(1e6 * answer["mean_pace"], 3)
    for name in ("cached", "local"):
        if isinstance(answer.get(name), list) and answer[name]:
            found[name] = [min(answer[name]), max(answer[name])]
    return found


def steady(samples: Sequence[Sample]) -> tuple[list[Sample], str]:
    """Leave out the requests that came while the CPU was slow; the launches of a step bind their time.

    The pace of a run is that of its quickest tenth, over all engines. A round without a request at this pace has no
    time to the first token and no CPU time. A round of several requests has one pace, the mean of its steps', and is
    left out or kept as a whole.

    Returns:
        The samples without those requests and rounds, and how many they are, in words.

    >>> quick = {"ttft": [30.0, 45.0, 32.0], "pace": [1.0, 1.5, 1.05], "cpus": [31.0, 47.0, 34.0], "ttft_p50": 32.0}
    >>> slow = {"ttft": [50.0], "pace": [1.6], "ttft_p50": 50.0, "ttft_p99": 50.0, "cpu": 7.0}
    >>> found, words = steady([quick, slow, {"mean_pace": 1.0, "cpu": 5.0}, {"mean_pace": 1.2, "cpu": 6.0}])
    >>> [{name: one[name] for name in ("ttft_p50", "ttft_p99", "cpu") if name in one} for one in found]
    [{'ttft_p50': 30.0, 'ttft_p99': 32.0, 'cpu': 32.5}, {}, {'cpu': 5.0}]
    >>> words
    '2 of 4 requests and 1 of 2 rounds of several requests'
    """
    paces = [pace for sample in samples for pace in sample.get("pace", ())]
    means = [sample["mean_pace"] for sample in samples if "mean_pace" in sample]
    most, most_mean = (SLOW * percentile(known, 0.1) if known else 0.0 for known in (paces, means))
    found = list[Sample]()
    for sample in samples:
        if "pace" in sample:
            found.append(_at_pace(sample, most))
        elif sample.get("mean_pace", 0.0) <= most_mean:
            found.append(sample)
    slow, rounds = (sum(pace > limit for pace in known) for known, limit in ((paces, most), (means, most_mean)))
    words = f"{slow:,} of {len(paces):,} requests and {rounds:,} of {len(means):,} rounds of several requests"
    return found, words


def _at_pace(sample: Sample, most: float) -> Sample:
    """Return a sample of requests alone without those that were slower than a pace."""
    quick = [pace <= most for pace in sample["pace"]]
    times = list(compress(sample["ttft"], quick))
    found = {name: value for name, value in sample.items() if name not in ("ttft_p50", "ttft_p99", "cpu")}
    if times:
        found |= {f"ttft_p{share}": percentile(times, share / 100) for share in (50, 99)}
        if "cpus" in sample:
            found["cpu"] = statistics.fmean(compress(sample["cpus"], quick))
    return found


def rows(samples: Sequence[Sample], link: Mapping[str, float]) -> list[Row]:
    """Return a row for every number and every way of kvplan, beside the other ways; see :func:`steady`.

    Args:
        samples: the samples of a run.
        link: by shape, milliseconds per token of the bytes on the link.
    """
    rounds: dict[Key, dict[str, list[float]]] = {}
    for sample in steady(samples)[0]:
        kept = rounds.setdefault(Key(*(sample[name] for name in Key._fields)), {})
        for name in COLUMNS:
            if name in sample:
                kept.setdefault(name, []).append(sample[name])
    return [
        _row(rounds, key, name, link.get(key.shape, 0.0))
        for key, kept in rounds.items() if way_of(key.way).ours for name in kept
    ]  # fmt: skip


def _row(rounds: Mapping[Key, Mapping[str, list[float]]], key: Key, name: str, link: float) -> Row:
    others = {way_of(other.way).title: kept[name] for other, kept in rounds.items()
              if other[:-1] == key[:-1] and not way_of(other.way).ours and name in kept}  # fmt: skip
    beside = {title: statistics.median(values) for title, values in others.items()}
    if name == "ttft_p50" and key.measure in ("alone", "beside") and link:
        beside[LINK] = key.held * link
    values, column = rounds[key][name], COLUMNS[name]
    spreads = {title: [min(theirs), max(theirs)] for title, theirs in others.items()}
    detail = {"least": min(values), "most": max(values), "rounds": len(values), "spreads": spreads}
    return Row(key.shape, f"{key.words}: {column.words}, {way_of(key.way).title}", column.unit,
               statistics.median(values), beside, more_is_better=name == "tokens_s", detail=detail)  # fmt: skip


def faults(samples: Iterable[Sample]) -> list[str]:
    """Return, as sentences, where a hit was not a hit: tokens that came from elsewhere, or had to be computed.

    >>> faults([{"shape": "8b", "way": "own", "measure": "alone", "held": 640, "suffix": 1, "round": 0,
    ...          "cached": [0, 640], "local": [0, 0]}])
    ['8b, own, alone 640 + 1, round 0: cached tokens 0 to 640, expected 640']
    """
    found = []
    for one in samples:
        where = f"{one['shape']}, {one['way']}, {one['measure']} {one['held']} + {one['suffix']}, round {one['round']}"
        expected = 0 if one["way"] == NO_OFFLOADING else one["held"]
        least, most = one.get("cached", (expected, expected))
        hits, local = one["measure"] in ("alone", "beside"), one.get("local", (0, 0))
        if hits and (least, most) != (expected, expected):
            found.append(f"{where}: cached tokens {least} to {most}, expected {expected}")
        if hits and local[1]:
            found.append(f"{where}: the GPU's own cache held up to {local[1]} tokens, expected 0")
        if one["measure"] == "resident" and local[0] < one["held"]:
            found.append(f"{where}: the GPU's own cache held {local[0]} tokens, expected {one['held']}")
        if one.get("unserved"):
            found.append(f"{where}: {one['unserved']} hits were not served in time")
    return found


def different_tokens(samples: Iterable[Sample]) -> list[str]:
    """Return, as sentences, which ways' first tokens are not those of most ways, for hits alone."""
    groups: dict[tuple[Any, ...], dict[str, list[int]]] = {}
    for one in samples:
        if one["measure"] == "alone":
            place = (one["shape"], one["held"], one["suffix"], one["round"])
            groups.setdefault(place, {})[one["way"]] = one["tokens"]
    counts: dict[str, list[bool]] = {}
    for (shape, *_), ways in groups.items():
        for k in range(max(map(len, ways.values()))):
            given = {way: tokens[k] for way, tokens in ways.items() if k < len(tokens)}
            usual = statistics.mode(given.values())
            for way, token in given.items():
                counts.setdefault(f"{shape}, {way}", []).append(token != usual)
    return [f"{who}: {sum(wrong)} of {len(wrong)} first tokens differ from most ways'"
            for who, wrong in counts.items() if any(wrong)]  # fmt: skip
