"""The table of all pairs as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvplan.base.numbers import between
from kvplan.cli.answers.pair_facts import alike, by_pool, pool_name, title

HEAD = """# All pairs

<!-- made by: kvplan pairs --markdown -->

The tables show every device layout of the catalogue (`kvplan/catalogue/layouts.toml`) against every host layout of the
same cache: {count:,} pairs, {refused}. `kvplan.compile` computes all numbers.

* A *unit* is the largest stretch of tokens of which whole blocks of both sides consist.
* *Runs* are the contiguous copies of a unit.
* *Host extents* are the contiguous ranges of a unit on the host, whatever the device looks like.
* *Alignment* is the largest power of two that divides every address, stride and size.
* A *whole model* pool holds the heads of all ranks, and the rank moves its own. The pool of `sglang-page-unified`
  always does, with one shard for each rank.

The numbers are those of a rank other than the first, because a pool may align the first rank better. Loads and stores
have the same numbers.

`kvplan pairs --device NAME --host NAME` picks some pairs, and `--json` gives them as data.
"""

REFUSED = """
## Two kinds of cache

K and V of each head (`mha`) and one latent row a token (`mla`) are different caches. No pair of the two kinds
compiles, and the error names the content of both sides:

    {message}
"""


def page(facts: Mapping[str, Any], message: str) -> str:
    """Return the page as Markdown.

    Args:
        facts: facts of all pairs, from :func:`kvplan.cli.answers.pair_facts.pairs_facts`.
        message: the error of compiling an mha cache with an mla cache.
    """
    refused = sum(pair["refused"] is not None for pair in facts["pairs"])
    pieces = [HEAD.format(count=len(facts["pairs"]), refused=f"{refused or 'no pair'} refused")]
    layouts = {layout["name"]: layout for layout in facts["layouts"]}
    for model in facts["models"]:
        pairs = [pair for pair in facts["pairs"] if pair["model"] == model["name"]]
        pieces.append(f"\n## {title(model)}\n")
        pieces.extend(_glance(model, pairs, layouts))
        pieces.extend(_hosts(model, pairs, layouts))
    pieces.append(REFUSED.format(message=message))
    return "".join(pieces)


def _glance(
    model: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]], layouts: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Return a table of runs and bytes of every pair for one pool, with a row for each device notation."""
    tokens, tp = model["block_tokens"], model["tp"]
    chosen = {(pair["device"], pair["host"]): pair for pair in pairs
              if (pair["host_block_tokens"], pair["host_tp"]) == (tokens, tp)}  # fmt: skip
    hosts = list(dict.fromkeys(host for _, host in chosen))
    rows: dict[tuple[str, ...], list[str]] = {}
    for device in dict.fromkeys(device for device, _ in chosen):
        cells = tuple(_cell(chosen[device, host]) for host in hosts)
        rows.setdefault(cells, []).append(device)
    yield f"\nRuns a unit x bytes a run, host blocks of {tokens} tokens:\n\n"
    yield from _table(("device layouts", *hosts), "l" + "r" * len(hosts),
                      ((", ".join(devices), *cells) for cells, devices in rows.items()))  # fmt: skip
    yield "\n"
    for device in dict.fromkeys(device for device, _ in chosen):
        yield f"- {device}: `{layouts[device]['notation']}`. {layouts[device]['source']}\n"


def _cell(pair: Mapping[str, Any]) -> str:
    if pair["refused"]:
        return "refused"
    return f"{pair['runs']:,} x {between(*pair['run_nbytes'])}"


def _hosts(
    model: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]], layouts: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Return a table for each host notation. Device layouts with equal numbers share a row."""
    pools = by_pool(pairs)
    names: dict[str, list[str]] = {}
    for _, host, _, _ in pools:
        alike_hosts = names.setdefault(layouts[host]["notation"], [])
        if host not in alike_hosts:
            alike_hosts.append(host)
    for notation, hosts in names.items():
        sources = "; ".join(layouts[host]["source"] for host in hosts)
        yield f"\n### To {', '.join(hosts)}\n\n`{notation}`. {sources}\n\n"
        rows = []
        for (_, host, tokens, tp), held in pools.items():
            if host == hosts[0]:
                label = pool_name(model, tokens, tp)
                for one in alike(held):
                    numbers = (f"{one.runs} x {one.run_nbytes}", f"{one.extents} x {one.extent_nbytes}", one.alignment)
                    rows.append((label, *numbers, ", ".join(one.devices)))
        header = ("host blocks", "runs x bytes", "host extents x bytes", "alignment", "device layouts")
        yield from _table(header, "lrrrl", rows)


def _table(header: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    rules = ["---:" if side == "r" else "---" for side in align]
    for row in (header, rules, *rows):
        yield f"| {' | '.join(row)} |\n"
