"""A model's cache as plain facts: what ``kvplan inspect --model`` prints, ready for JSON."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, NamedTuple

from kvplan.base.quoting import quoted
from kvplan.catalogue.layouts import STATE, NamedLayout, layout_for, named_layouts
from kvplan.catalogue.models import Group, Model
from kvplan.cli.answers.layout_facts import extent_facts
from kvplan.errors import KVPlanError
from kvplan.layout.notation import parse
from kvplan.plan.copy_program import compile  # noqa: A004

CONTEXTS = (1024, 32768, 131072)  # tokens

# The order an engine has if nobody asks for another, by kind of cache.
ENGINES = {
    "vllm": {"mha": "vllm-LBHNC", "mla": "vllm-mla-cross-layer"},
    "sglang": {"mha": "sglang-device", "mla": "sglang-device-mla"},
    "flashinfer": {"mha": "flashinfer-NHD", "mla": "mla"},
    "tensorrt-llm": {"mha": "tensorrt-llm"},
    "transformers": {"mha": "transformers"},
}
HOSTS = {"mha": "page-first", "mla": "mla-page-first"}


class Question(NamedTuple):
    """What is asked of a model.

    Attributes:
        device, host: the layouts of attention; states have their own.
        block_tokens, host_block_tokens: rows a block on each side.
        blocks: on the device.
        link_gbps: of the link between them, 10^9 bytes a second.
    """

    device: NamedLayout
    host: NamedLayout
    dtype: str
    tp: int
    block_tokens: int
    host_block_tokens: int
    blocks: int
    link_gbps: float


def choose(name: str, side: str, kind: str) -> NamedLayout:
    """A layout by the name of an engine, its own name, or a notation.

    Args:
        name: empty for the default of a host.
        side: ``"device"`` or ``"host"``.
        kind: of the model's cache, ``"mha"`` or ``"mla"``.

    Raises:
        KVPlanError: no such layout, or one of another kind.

    >>> choose("vllm", "device", "mla").name
    'vllm-mla-cross-layer'
    """
    option = {"device": "--engine", "host": "--host"}[side]
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
    hint = f"near it: {_list(near)}" if near else f"there are {_list(names)}"
    raise KVPlanError(f"{option} {quoted(name)} is no layout of the catalogue and no notation; {hint}")


def _list(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _kind_of(notation: str, option: str, kind: str) -> str:
    """The kind of a notation: K and V of each head, or rows without."""
    axes = parse(notation).axes
    has = "mha" if "kv" in axes else "mla"
    for axis in ("layer", "block", "token"):
        if axis not in axes:
            raise KVPlanError(f"{option} '{notation}' has no axis {axis!r}; a model's cache has one")
    if has != kind:
        wanted = "a kv axis" if kind == "mha" else "no kv axis"
        raise KVPlanError(f"{option} '{notation}' is of the kind {has}, and the model's cache is {kind}: {wanted}")
    return has


def model_facts(model: Model, asked: Question) -> dict[str, Any]:
    """Everything there is to say; bytes unless the name says otherwise.

    Raises:
        KVPlanError: heads and ranks that do not divide, a dtype that is unknown.
    """
    groups = [_group(group, asked) for group in model.groups]
    # Rows of several groups share tokens; states do not grow with them.
    growing = [facts for facts in groups if facts["token_nbytes"] is not None]
    token = sum(facts["token_nbytes"] for facts in growing)
    kept = sum(facts["token_nbytes"] for facts in growing if facts["window"] is None)
    state = sum(facts["block_nbytes"] for facts in groups if facts["kind"] == "state")
    return {
        "model": {
            "name": model.name,
            "layers": model.layers,
            "source": model.source,
            "verified": model.verified,
            "note": model.note,
        },
        "dtype": asked.dtype,
        "tp": asked.tp,
        "block_tokens": asked.block_tokens,
        "host_block_tokens": asked.host_block_tokens,
        "device": {"layout": asked.device.name, "notation": asked.device.notation},
        "host": {"layout": asked.host.name, "notation": asked.host.notation},
        "token_nbytes": {"rank": token, "all": token * asked.tp},
        "kept_token_nbytes": {"rank": kept, "all": kept * asked.tp},
        "state_nbytes": {"rank": state, "all": state * asked.tp} if state else None,
        "groups": groups,
        "link_gbps": asked.link_gbps,
        "contexts": [_context(tokens, model.groups, groups, asked) for tokens in CONTEXTS],
    }


def _group(group: Group, asked: Question) -> dict[str, Any]:
    state = group.kind == "state"
    rows, host_rows = (1, 1) if state else (asked.block_tokens, asked.host_block_tokens)
    # Not rank 0, whose heads lie at the front of a shared pool and so more aligned than those of the others.
    rank = min(asked.tp - 1, 1)
    host_blocks = -(-asked.blocks * rows // host_rows)
    device = layout_for(STATE["device"] if state else asked.device, group, num_blocks=asked.blocks, block_tokens=rows,
                        dtype=asked.dtype, tp=asked.tp, rank=rank)  # fmt: skip
    host = layout_for(STATE["host"] if state else asked.host, group, num_blocks=host_blocks, block_tokens=host_rows,
                      dtype=asked.dtype, tp=asked.tp, rank=rank)  # fmt: skip
    program = compile(device, host)
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
        "unit_tokens": program.unit_tokens,
        "unit_nbytes": program.unit_nbytes,
        "runs": program.runs,
        "run_nbytes": list(program.run_nbytes),
        "host_extents": extent_facts(program.program, "dst"),
        "alignment": program.alignment,
    }


def _quotient(total: int, count: int) -> float:
    return total / count if total % count else total // count


def _context(tokens: int, groups: tuple[Group, ...], facts: list[dict[str, Any]], asked: Question) -> dict[str, Any]:
    """What a request of so many tokens holds and moves on one rank: whole blocks of the device."""
    blocks = nbytes = runs = 0
    for group, told in zip(groups, facts, strict=True):
        held = group.rows_held(tokens, asked.block_tokens)
        rows = 1 if group.kind == "state" else asked.block_tokens
        blocks += held // rows
        nbytes += held * told["row_nbytes"]
        runs += held // told["unit_tokens"] * told["runs"]
    return {
        "tokens": tokens,
        "blocks": blocks,
        "nbytes": nbytes,
        "runs": runs,
        "seconds": nbytes / (asked.link_gbps * 1e9),
    }
