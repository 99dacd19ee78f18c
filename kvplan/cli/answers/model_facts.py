"""Facts of a model's cache as plain data, which ``kvplan inspect --model`` prints."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, NamedTuple

from kvplan.base.quoting import quoted
from kvplan.catalogue.layouts import STATE, NamedLayout, layout_for, named_layouts
from kvplan.catalogue.models import Group, Model
from kvplan.cli.answers.layout_facts import UNIT, extent_facts, picked
from kvplan.cli.answers.model_times import Costs, Sides, better_of, times_of
from kvplan.cli.answers.peer_facts import Peer, context_by_nixl, context_to_peer, group_to_peer, peer_facts, scattered
from kvplan.errors import KVPlanError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.notation import parse
from kvplan.plan.copy_program import compile_quietly
from kvplan.plan.plan import Plan

CONTEXTS = (1024, 32768, 131072)  # tokens

# The default layout of each engine, by kind of cache.
ENGINES = {
    "vllm": {"mha": "vllm-LBHNC", "mla": "vllm-mla-cross-layer"},
    "sglang": {"mha": "sglang-device", "mla": "sglang-device-mla"},
    "flashinfer": {"mha": "flashinfer-NHD", "mla": "mla"},
    "tensorrt-llm": {"mha": "tensorrt-llm"},
    "transformers": {"mha": "transformers"},
}
HOSTS = {"mha": "page-first", "mla": "mla-page-first"}


class Question(NamedTuple):
    """The layouts and sizes for which a model's cache is computed.

    Attributes:
        device, host: layouts of attention; states have separate layouts.
        block_tokens, host_block_tokens: rows per block on each side.
        blocks: number of blocks on the device.
        link_gbps: rate of the link between both sides, 10^9 bytes per second.
        contexts: lengths of requests, tokens.
        peer: the other GPU, if the question is also about it.
        costs: costs of transfers by each path; without them, only the times of the link are returned.
    """

    device: NamedLayout
    host: NamedLayout
    dtype: str
    tp: int
    block_tokens: int
    host_block_tokens: int
    blocks: int
    link_gbps: float
    contexts: tuple[int, ...] = CONTEXTS
    peer: Peer | None = None
    costs: Costs | None = None


def choose(name: str, side: str, kind: str) -> NamedLayout:
    """Return the layout of an engine, of a layout's name, or of a notation.

    Args:
        name: empty for the default layout of a host.
        side: ``"device"``, ``"host"``, or ``"peer"`` for a device layout on another GPU.
        kind: kind of the model's cache, ``"mha"`` or ``"mla"``.

    Raises:
        KVPlanError: there is no such layout, or it is of another kind.

    >>> choose("vllm", "device", "mla").name
    'vllm-mla-cross-layer'
    """
    option = {"device": "--engine", "host": "--host", "peer": "--peer-layout"}[side]
    side = "host" if side == "host" else "device"
    known = {layout.name: layout for layout in named_layouts().values() if layout.side == side}
    fitting = [layout.name for layout in known.values() if layout.kind == kind]
    if side == "host" and not name:
        return known[HOSTS[kind]]
    if side == "device" and name in ENGINES:
        default = ENGINES[name].get(kind)
        if default is None:
            raise KVPlanError(f"{option} {name!r} has no {kind} layout in the catalogue; there are {_list(fitting)}")
        return known[default]
    if name in known:
        if known[name].kind != kind:
            raise KVPlanError(f"{option} {name!r} is a layout of {known[name].kind} caches, and the model's is {kind}; "
                              f"{side} layouts of that are {_list(fitting)}")  # fmt: skip
        return known[name]
    if " " in name.strip():
        return NamedLayout("as given", side, _kind_of(name, option, kind), name, "the command line")
    names = [*(ENGINES if side == "device" else ()), *fitting]
    near = get_close_matches(name, names, n=3)
    hint = f"did you mean {_list(near)}?" if near else f"there are {_list(names)}"
    raise KVPlanError(f"{option} {quoted(name)} is neither a layout of the catalogue nor a notation; {hint}")


def _list(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _kind_of(notation: str, option: str, kind: str) -> str:
    """Return the kind of a notation: ``"mha"`` with a kv axis, otherwise ``"mla"``."""
    axes = parse(notation).axes
    has = "mha" if "kv" in axes else "mla"
    for axis in ("layer", "block", "token"):
        if axis not in axes:
            raise KVPlanError(f"{option} '{notation}' has no axis {axis!r}, which a model's cache needs")
    if has != kind:
        wanted = "a kv axis" if kind == "mha" else "no kv axis"
        raise KVPlanError(f"{option} '{notation}' is of kind {has}, and the model's cache is {kind}: {wanted}")
    return has


def model_facts(model: Model, asked: Question) -> dict[str, Any]:
    """Return every fact of a model's cache; numbers are bytes unless the name says otherwise.

    Raises:
        KVPlanError: the ranks do not divide the heads, or the dtype is unknown.
    """
    sides = [_sides(group, asked) for group in model.groups]
    groups = [_group(group, asked, both) for group, both in zip(model.groups, sides, strict=True)]
    # Groups share tokens, so their bytes add up. States do not grow with tokens.
    growing = [facts for facts in groups if facts["token_nbytes"] is not None]
    token = sum(facts["token_nbytes"] for facts in growing)
    kept = sum(facts["token_nbytes"] for facts in growing if facts["window"] is None)
    state = sum(facts["block_nbytes"] for facts in groups if facts["kind"] == "state")
    return {
        "model": picked(model, ("name", "layers", "source", "verified", "note")),
        **picked(asked, ("dtype", "tp", "block_tokens", "host_block_tokens")),
        "device": {"layout": asked.device.name, "notation": asked.device.notation},
        "host": {"layout": asked.host.name, "notation": asked.host.notation},
        "token_nbytes": {"rank": token, "all": token * asked.tp},
        "kept_token_nbytes": {"rank": kept, "all": kept * asked.tp},
        "state_nbytes": {"rank": state, "all": state * asked.tp} if state else None,
        "groups": groups,
        "link_gbps": asked.link_gbps,
        "contexts": [_context(tokens, model.groups, groups, asked, sides) for tokens in asked.contexts],
        **(
            {}
            if asked.costs is None
            else {
                "profile": asked.costs.where or f"as on {asked.costs.profile.kind}",
                "better": _better(model.groups, sides, asked, asked.costs),
            }
        ),
        **({} if asked.peer is None else {"peer": peer_facts(asked.peer)}),
    }


def _of_rank(group: Group, asked: Question, named: NamedLayout, block_rows: int, on: str | None = None) -> KVLayout:
    """Return the layout of one rank. Not of rank 0: its heads are first in a shared pool, and so are better aligned."""
    state = group.kind == "state"
    rows, held = (1, 1) if state else (asked.block_tokens, block_rows)
    return layout_for(STATE[named.side] if state else named, group, dtype=asked.dtype, tp=asked.tp,
                      rank=min(asked.tp - 1, 1), num_blocks=-(-asked.blocks * rows // held), block_tokens=held,
                      device=on)  # fmt: skip


def _sides(group: Group, asked: Question) -> Sides:
    device = _of_rank(group, asked, asked.device, asked.block_tokens)
    return Sides.of(device, _of_rank(group, asked, asked.host, asked.host_block_tokens))


def _better(groups: tuple[Group, ...], sides: list[Sides], asked: Question, costs: Costs) -> list[dict[str, Any]]:
    """Return the better order of the host side of each group, for the longest request."""
    longest = max(asked.contexts)
    found = []
    for group, both in zip(groups, sides, strict=True):
        better = better_of(both, group.rows_held(longest, asked.block_tokens), costs)
        found += [] if better is None else [{"group": group.name, "tokens": longest, **better}]
    return found


def _group(group: Group, asked: Question, sides: Sides) -> dict[str, Any]:
    state = group.kind == "state"
    rows = 1 if state else asked.block_tokens
    device, program, peer = sides.device, sides.programs["store"], asked.peer
    there = None if peer is None else _of_rank(group, asked, peer.layout, peer.block_tokens, "cuda:1")
    moved = None if there is None else compile_quietly(device, there)
    elements, dtype = group.stored_as(asked.dtype)
    row_nbytes = device.block_nbytes // rows
    return {
        "name": group.name,
        "kind": group.kind,
        "layers": list(group.layers),
        "heads": group.heads,
        "rank_heads": len(group.rank_heads(asked.tp)),
        "copies": group.copies(asked.tp),
        "dim": group.rank_share(elements, asked.tp),
        "dtype": dtype,
        "window": group.window,
        "row_tokens": group.row_tokens,
        "row_nbytes": row_nbytes,
        "token_nbytes": None if state else _quotient(row_nbytes, group.row_tokens),
        "block_nbytes": device.block_nbytes,
        **picked(program, UNIT),
        "host_extents": extent_facts(program.program, "dst"),
        "alignment": program.alignment,
        **({} if moved is None else {"peer": group_to_peer(moved)}),
    }


def _quotient(total: int, count: int) -> float:
    return total / count if total % count else total // count


def _context(
    tokens: int, groups: tuple[Group, ...], facts: list[dict[str, Any]], asked: Question, sides: list[Sides]
) -> dict[str, Any]:
    """Return the bytes that a request of ``tokens`` tokens holds and moves on one rank, in whole device blocks."""
    blocks = nbytes = runs = peer_runs = 0
    peer = asked.peer
    rows_held = [group.rows_held(tokens, asked.block_tokens) for group in groups]
    for group, told, held in zip(groups, facts, rows_held, strict=True):
        rows = 1 if group.kind == "state" else asked.block_tokens
        blocks += held // rows
        nbytes += held * told["row_nbytes"]
        runs += held // told["unit_tokens"] * told["runs"]
        if peer is not None:
            peer_runs += held // told["peer"]["unit_tokens"] * told["peer"]["runs"]
    return {
        "tokens": tokens,
        "blocks": blocks,
        "nbytes": nbytes,
        "runs": runs,
        "seconds": nbytes / (asked.link_gbps * 1e9),
        **({} if asked.costs is None else times_of(sides, rows_held, asked.costs)),
        **({} if peer is None else {"peer": _to_peer(groups, rows_held, nbytes, peer_runs, asked, peer)}),
    }


def _to_peer(
    groups: tuple[Group, ...], rows_held: list[int], nbytes: int, runs: int, asked: Question, peer: Peer
) -> dict[str, Any]:  # fmt: skip
    """Return the way of a request to the other GPU."""
    if peer.link.gbps is not None:
        return context_to_peer(nbytes, runs, peer.link.gbps, asked.link_gbps)
    return context_by_nixl([_prompt(*pair, asked, peer) for pair in zip(groups, rows_held, strict=True)])


def _prompt(group: Group, rows: int, asked: Question, peer: Peer) -> Plan:
    """Plan a request of one group, whose blocks are scattered over pools of twice their number."""
    state = group.kind == "state"
    here, there = (1, 1) if state else (asked.block_tokens, peer.block_tokens)
    pools = asked._replace(blocks=2 * rows // here + there)
    sides = _of_rank(group, pools, asked.device, here), _of_rank(group, pools, peer.layout, there, "cuda:1")
    src, dst = (scattered(-(-rows // held), side.num_blocks) for held, side in zip((here, there), sides, strict=True))
    return compile_quietly(*sides).plan(src, dst[::-1])
