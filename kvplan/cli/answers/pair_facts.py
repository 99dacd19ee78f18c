"""Facts of every pair of a device layout and a host layout of the catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from kvplan.base.numbers import between, count_of
from kvplan.base.quoting import quoted
from kvplan.catalogue.layouts import NamedLayout, layout_for, named_layouts
from kvplan.catalogue.models import Group, find_model
from kvplan.cli.answers.layout_facts import UNIT, extent_facts, picked
from kvplan.errors import IncompatibleLayoutsError, KVPlanError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.copy_program import compile_quietly

HOST_TOKENS = (16, 64)
HOLDS = {"mha": "K and V of each head", "mla": "one latent row a token"}
NUM_BLOCKS = 1024
NAMED = ("name", "side", "kind", "notation", "source")


class Reference(NamedTuple):
    """A model that stands for its kind of cache, as one rank holds it.

    Attributes:
        name: name in the catalogue of models.
        tp: number of ranks that share the KV heads.
        block_tokens: token slots per device block.
        pools: number of ranks that share the heads of each host pool; 1 is a pool of the whole model.
    """

    name: str
    tp: int
    block_tokens: int
    pools: tuple[int, ...]

    @property
    def geometry(self) -> Group:
        """Return layers, heads and rows of the model."""
        return find_model(self.name).groups[0]


REFERENCES = (
    Reference("llama-3.1-70b", tp=4, block_tokens=16, pools=(4, 1)),
    Reference("deepseek-v3", tp=1, block_tokens=64, pools=(1,)),
)


def pairs_facts(device: str | None = None, host: str | None = None) -> dict[str, Any]:
    """Return every pair as plain facts; numbers are bytes unless the name says otherwise.

    Args:
        device, host: name of one layout of that side; None for all layouts.

    Raises:
        KVPlanError: that side has no layout with this name.
        IncompatibleLayoutsError: a device and a host layout of different kinds.
    """
    devices, hosts = _side("device", device), _side("host", host)
    pairs = [pair for reference in REFERENCES for pair in _pairs(reference, devices, hosts)]
    if not pairs:
        (one,), (other,) = devices, hosts
        raise IncompatibleLayoutsError(
            f"{one.name!r} holds {HOLDS[one.kind]} and {other.name!r} {HOLDS[other.kind]}: these are different "
            "caches, and each lacks the parts of the other"
        )
    used = {pair["model"] for pair in pairs}
    return {
        "models": [_model(reference) for reference in REFERENCES if reference.name in used],
        "layouts": [picked(named, NAMED) for named in (*devices, *hosts)],
        "pairs": pairs,
    }


def _side(side: str, name: str | None) -> list[NamedLayout]:
    found = {layout.name: layout for layout in named_layouts().values() if layout.side == side}
    if name is None:
        return list(found.values())
    if name not in found:
        raise KVPlanError(f"--{side} {quoted(name)} is not a {side} layout of the catalogue; it has {', '.join(found)}")
    return [found[name]]


def _model(reference: Reference) -> dict[str, Any]:
    return {
        "name": reference.name,
        "kind": reference.geometry.kind,
        "layers": len(reference.geometry.layers),
        "heads": reference.geometry.heads,
        "dim": reference.geometry.dim,
        "dtype": "bf16",
        "tp": reference.tp,
        "block_tokens": reference.block_tokens,
    }


def _pairs(reference: Reference, devices: list[NamedLayout], hosts: list[NamedLayout]) -> Iterator[dict[str, Any]]:
    caches = [(one, _build(one, reference, reference.block_tokens, reference.tp, "cuda:0"))
              for one in devices if one.kind == reference.geometry.kind]  # fmt: skip
    for host in hosts:
        if host.kind != reference.geometry.kind:
            continue
        # A pool that is sharded over all ranks is already a pool of the whole model.
        for tp in (reference.tp,) if "tp" in host.split.values() else reference.pools:
            for tokens in HOST_TOKENS:
                pool = _build(host, reference, tokens, tp, "cpu")
                where = {"model": reference.name, "host": host.name, "host_block_tokens": tokens, "host_tp": tp}
                for device, cache in caches:
                    yield {"device": device.name, **where, **pair_facts(cache, pool)}


def _build(named: NamedLayout, reference: Reference, tokens: int, tp: int, device: str) -> KVLayout:
    # Not rank 0: its heads are first in a pool, and so are better aligned than the heads of other ranks.
    return layout_for(named, reference.geometry, num_blocks=NUM_BLOCKS, block_tokens=tokens, dtype="bf16", tp=tp,
                      rank=min(tp - 1, 1), device=device)  # fmt: skip


def mixed_kinds() -> str:
    """Return the error of compiling a cache of K and V with latent rows of the same number of layers."""
    mha, mla = REFERENCES
    first = {(named.side, named.kind): named for named in reversed(named_layouts().values())}
    device = _build(first["device", "mha"], mha, mha.block_tokens, mha.tp, "cuda:0")
    host = _build(first["host", "mla"], mla, mla.block_tokens, mla.tp, "cpu")
    return str(pair_facts(device.slice(layers=host.layers), host)["refused"])


def pair_facts(device: KVLayout, host: KVLayout) -> dict[str, Any]:
    """Return the facts of one unit that moves between two layouts, or the reason why the pair is refused."""
    try:
        compiled = compile_quietly(device, host)
    except IncompatibleLayoutsError as error:
        return {"refused": " ".join(str(error).split()), **dict.fromkeys((*UNIT, "host_extents", "alignment"))}
    extents = extent_facts(compiled.program, "dst")
    return {"refused": None, **picked(compiled, UNIT), "host_extents": extents, "alignment": compiled.alignment}


class Alike(NamedTuple):
    """Device layouts whose units move to one pool in the same runs.

    Attributes:
        runs: number of runs per unit; ``"refused"`` for a refused pair, whose reason is in ``run_nbytes``.
        run_nbytes, extent_nbytes: bytes per run and per extent: one number, or the smallest and the largest.
    """

    runs: str
    run_nbytes: str
    extents: str
    extent_nbytes: str
    alignment: str
    devices: tuple[str, ...]


def by_pool(pairs: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, int, int], list[Mapping[str, Any]]]:
    """Return pairs by their pool: model, host layout, tokens of a host block, ranks that share the heads."""
    pools: dict[tuple[str, str, int, int], list[Mapping[str, Any]]] = {}
    for pair in pairs:
        key = (pair["model"], pair["host"], pair["host_block_tokens"], pair["host_tp"])
        pools.setdefault(key, []).append(pair)
    return pools


def alike(pairs: Iterable[Mapping[str, Any]]) -> list[Alike]:
    """Return the pairs of one pool in groups of equal numbers, the longest runs first."""
    groups: dict[Alike, list[Mapping[str, Any]]] = {}
    for pair in pairs:
        groups.setdefault(_numbers(pair), []).append(pair)
    ordered = sorted(groups.items(), key=lambda group: _rank(group[1][0]))
    return [numbers._replace(devices=tuple(pair["device"] for pair in held)) for numbers, held in ordered]


def _rank(pair: Mapping[str, Any]) -> tuple[int, int]:
    return (1, 0) if pair["refused"] else (-pair["run_nbytes"][0], pair["runs"])


def _numbers(pair: Mapping[str, Any]) -> Alike:
    if pair["refused"]:
        return Alike("refused", pair["refused"], "", "", "", ())
    extents = pair["host_extents"]
    return Alike(
        runs=f"{pair['runs']:,}",
        run_nbytes=between(*pair["run_nbytes"]),
        extents=f"{extents['count']:,}",
        extent_nbytes=between(extents["min_nbytes"], extents["max_nbytes"]),
        alignment=f"{pair['alignment']:,}",
        devices=(),
    )


def title(model: Mapping[str, Any]) -> str:
    """Return a reference model as one line of text.

    >>> title({"name": "m", "kind": "mla", "layers": 2, "heads": 1, "dim": 8, "dtype": "bf16", "tp": 1,
    ...        "block_tokens": 64})
    'm, one rank: 2 layers, rows of 8, bf16, device blocks of 64 tokens'
    """
    heads = max(model["heads"] // model["tp"], 1)
    rows = f"rows of {model['dim']}" if model["kind"] == "mla" else f"{count_of(heads, 'KV head')} x {model['dim']}"
    rank = "one rank" if model["tp"] == 1 else f"a rank of TP {model['tp']}"
    return (f"{model['name']}, {rank}: {model['layers']} layers, {rows}, {model['dtype']}, device blocks of "
            f"{model['block_tokens']} tokens")  # fmt: skip


def pool_name(model: Mapping[str, Any], tokens: int, tp: int) -> str:
    """Return the name of a host pool: its block size, and whether it holds the heads of a rank or of all ranks."""
    if model["tp"] == 1:
        return f"{tokens} tokens"
    return f"{tokens} tokens, " + (f"TP {tp}" if tp > 1 else "whole model")
