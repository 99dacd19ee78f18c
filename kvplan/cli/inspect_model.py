"""``kvplan inspect --model``: print the size of a model's cache and how it would move, without tensors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvplan.base.numbers import between, binary, duration, exact
from kvplan.catalogue.config import read_config
from kvplan.catalogue.layouts import layout_for
from kvplan.catalogue.models import Model, find_model, models
from kvplan.cli.answers.model_facts import CONTEXTS, Question, choose, model_facts
from kvplan.cli.answers.model_times import ROUTES, Costs
from kvplan.cli.answers.peer_facts import KERNEL_SHARE, LINKS, Peer, link
from kvplan.cli.arguments.sources import add_advice, add_costs
from kvplan.cli.arguments.values import context_lengths, positive, rate
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.pictures import add_pictures, check_pictures, draw_pictures
from kvplan.cli.screen.printing import fact_table, number_table, show
from kvplan.cost.policy import Policy
from kvplan.cost.store import profile_of
from kvplan.errors import KVPlanError
from kvplan.layout.kvlayout import KVLayout

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """examples:
  kvplan inspect --model
  kvplan inspect --model llama-3.1-70b --engine vllm --tp 4 --host page-first
  kvplan inspect --model llama-3.1-70b --peer nvlink --peer-layout flashinfer
  kvplan inspect --model deepseek-v3 --peer nixl
  kvplan inspect --config path/to/config.json --block-tokens 64"""

LINK_GBPS = 55.1  # measured: one large copy from host to device, H100 on PCIe Gen5 x16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", nargs="?", const="", metavar="NAME", help="of the catalogue; without NAME, list all")
    source.add_argument("--config", metavar="FILE", help="a config.json of Hugging Face")
    add = parser.add_argument
    add("--engine", default="vllm", metavar="NAME",
        help="an engine, a device layout of the catalogue, or a notation (default vllm)")  # fmt: skip
    add("--host", metavar="NAME", help="a host layout of the catalogue, or a notation (default page-first)")
    add("--dtype", default="bf16", help="of the cache, or a row format such as fp8_ds_mla (default bf16)")
    add("--tp", type=positive, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    add("--block-tokens", type=positive, default=16, metavar="N", help="of the device (default 16)")
    add("--host-block-tokens", type=positive, metavar="N", help="of the host (default: as on the device)")
    add("--blocks", type=positive, default=1024, metavar="N", help="on the device (default 1024)")
    add("--link-gbps", type=rate, default=LINK_GBPS, metavar="GB/S",
        help=f"of the link, in 10^9 bytes a second (default {LINK_GBPS})")  # fmt: skip
    add("--contexts", "--tokens", type=context_lengths, default=CONTEXTS, metavar="N,...",
        help="tokens of requests; 32k is 32,768 (default 1k,32k,128k)")  # fmt: skip
    add("--peer", type=link, metavar="LINK",
        help="also to another GPU: nvlink or pcie, the GB/s of one large copy; or nixl: descriptors of a prompt, and "
        "pieces if packed")  # fmt: skip
    add("--peer-layout", metavar="NAME", help="on that GPU, as for --engine (default: as --engine)")
    add("--peer-block-tokens", type=positive, metavar="N", help="on that GPU (default: as on the device)")
    add_costs(parser)
    add_advice(parser)
    add_pictures(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.inspect-model)")


def run(args: argparse.Namespace) -> int:
    """Print the model's cache, or list the models of the catalogue."""
    if args.model == "":
        _list(as_json=args.json)
        return 0
    model = find_model(args.model) if args.config is None else read_config(args.config)
    question = _question(args, model)
    facts = model_facts(model, question)
    device = _device(model, question)
    check_pictures(args, device)
    if args.json:
        print_json("inspect-model", facts)
    else:
        _show(facts)
    draw_pictures(args, device)
    return 0


def _device(model: Model, asked: Question) -> KVLayout:
    """Build the device layout of one rank for the first group that has tokens."""
    group = next(group for group in model.groups if group.kind != "state")
    return layout_for(asked.device, group, num_blocks=asked.blocks, block_tokens=asked.block_tokens,
                      dtype=asked.dtype, tp=asked.tp, rank=min(asked.tp - 1, 1))  # fmt: skip


def _question(args: argparse.Namespace, model: Model) -> Question:
    kind = next((group.kind for group in model.groups if group.kind != "state"), None)
    if kind is None:
        raise KVPlanError(f"{model.name} has no layer with attention, so no tokens to count")
    device = choose(args.engine, "device", kind)
    host = choose(args.host or "", "host", kind)
    host_tokens = args.host_block_tokens or args.block_tokens
    return Question(device, host, args.dtype, args.tp, args.block_tokens, host_tokens, args.blocks, args.link_gbps,
                    args.contexts, _peer(args, kind), _costs(args))  # fmt: skip


def _costs(args: argparse.Namespace) -> Costs:
    profile, where = profile_of(args.profile)
    return Costs(profile, Policy(overlap=args.overlap), where, args.advice)


def _peer(args: argparse.Namespace, kind: str) -> Peer | None:
    if args.peer is None:
        for option, given in (("--peer-layout", args.peer_layout), ("--peer-block-tokens", args.peer_block_tokens)):
            if given is not None:
                raise KVPlanError(f"{option} needs --peer, the link to the other GPU: {' or '.join(LINKS)}, or GB/s")
        return None
    layout = choose(args.peer_layout or args.engine, "peer", kind)
    return Peer(args.peer, layout, args.peer_block_tokens or args.block_tokens)


def _list(*, as_json: bool) -> None:
    known = list(models().values())
    if as_json:
        rows = [{"name": m.name, "layers": m.layers, "groups": [group.name for group in m.groups], "source": m.source,
                 "verified": m.verified} for m in known]  # fmt: skip
        print_json("models", {"models": rows})
        return
    table = [(m.name, str(m.layers), ", ".join(f"{len(g.layers)} {g.name}" for g in m.groups)) for m in known]
    show(number_table(("model", "layers", "groups"), table, right=(1,)))


def _show(facts: dict[str, Any]) -> None:
    groups = facts["groups"]
    show(
        fact_table(_summary(facts)),
        number_table(("group", "layers", "rows of", "window", "a token", "a block"), map(_group, groups),
                     right=(1, 4, 5)),
        number_table(_moves_header("host"), [_moves(group, group, group["host_extents"]) for group in groups],
                     right=(1, 2, 3, 4, 5, 6)),
        number_table(("context", "blocks", "bytes a rank", "", "runs", "at the link"),
                     map(_context, facts["contexts"]), right=(0, 1, 2, 3, 4, 5)),
        number_table(("context", *(f"{route} by the best path" for route in ROUTES)),
                     map(_times, facts["contexts"]), right=(0,)),
        fact_table(_better(facts)),
        *(_peer_tables(facts) if "peer" in facts else ()),
    )  # fmt: skip


def _peer_tables(facts: dict[str, Any]) -> tuple[Table, Table]:
    moves = [_moves(group, group["peer"], group["peer"]["extents"]) for group in facts["groups"]]
    if "link_gbps" not in facts["peer"]:
        prompts = number_table(("context", "descriptors", "bytes each", "pieces if packed", "bytes each"),
                               map(_context_by_nixl, facts["contexts"]), right=(0, 1, 2, 3, 4))  # fmt: skip
        return number_table(_moves_header("peer"), moves, right=(1, 2, 3, 4, 5, 6)), prompts
    return (
        number_table(_moves_header("peer"), moves, right=(1, 2, 3, 4, 5, 6)),
        number_table(("context", "runs to the peer", "at the link", "by kernel", "through the host"),
                     map(_context_to_peer, facts["contexts"]), right=(0, 1, 2, 3, 4)),
    )  # fmt: skip


def _summary(facts: dict[str, Any]) -> list[tuple[str, str]]:
    model, token, kept = facts["model"], facts["token_nbytes"], facts["kept_token_nbytes"]
    state = facts["state_nbytes"]
    rows = [
        ("model", f"{model['name']}, {model['layers']} layers"),
        ("source", model["source"] + ("" if model["verified"] else " (from memory, not verified)")),
    ]
    if model["note"]:
        rows.append(("note", model["note"]))
    rows += [
        ("KV heads", _heads(facts)),
        ("a token", _of_ranks(token, facts["tp"])),
        *([("past windows", _of_ranks(kept, facts["tp"]))] if kept != token else []),
        *([("a state", _of_ranks(state, facts["tp"]) + ", one a request")] if state else []),
        ("device", _side(facts["device"], facts["block_tokens"])),
        ("host", _side(facts["host"], facts["host_block_tokens"])),
        ("link", f"{facts['link_gbps']:g} GB/s for each rank is assumed; its times are lower bounds"),
    ]
    if "peer" in facts:
        peer = facts["peer"]
        rows.append(("peer", _side(peer, peer["block_tokens"])))
        link = f"{peer['link']}; the blocks of a prompt are scattered, so that no two of them touch"
        if "link_gbps" in peer:
            copied = f"{peer['link_gbps']:g} GB/s for one large copy ({peer['link']})"
            link = f"{copied}; a kernel is assumed to reach {KERNEL_SHARE} of it"
        rows.append(("peer link", link))
    return rows


def _heads(facts: dict[str, Any]) -> str:
    first, tp = facts["groups"][0], facts["tp"]
    if first["kind"] == "mla":
        return "none" if tp == 1 else f"none: each of {tp} ranks holds every row"
    if tp == 1:
        return f"{first['heads']}"
    shared = "" if first["copies"] == 1 else f": replicated, every head is on {first['copies']} of them"
    return f"{first['heads']}, {first['rank_heads']} on each of {tp} ranks{shared}"


def _of_ranks(nbytes: dict[str, float], tp: int) -> str:
    if tp == 1:
        return _exact(nbytes["rank"])
    return f"{_exact(nbytes['rank'])} a rank, {_number(nbytes['all'])} on all {tp}"


def _exact(nbytes: float) -> str:
    return exact(nbytes) if isinstance(nbytes, int) else f"{_number(nbytes)} bytes ({binary(round(nbytes))})"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _side(side: dict[str, Any], tokens: int) -> str:
    return f"{side['layout']}, blocks of {tokens}\n{side['notation']}"


def _group(group: dict[str, Any]) -> tuple[str, ...]:
    heads, dim = group["rank_heads"], group["dim"]
    rows = f"{dim:,} {'bytes' if group['dtype'] == 'uint8' else group['dtype']}"
    if group["kind"] == "mha":
        rows = f"{heads} x {rows}, K, V"
    if group["row_tokens"] > 1:
        rows += f", 1 in {group['row_tokens']}"
    window = "-" if group["window"] is None else f"{group['window']:,}"
    token = "-" if group["token_nbytes"] is None else _number(group["token_nbytes"])
    return group["name"], f"{len(group['layers'])}", rows, window, token, f"{group['block_nbytes']:,}"


def _moves_header(side: str) -> tuple[str, ...]:
    return "group", "unit", "runs", "bytes each", f"{side} extents", "bytes each", "aligned"


def _moves(group: dict[str, Any], copies: dict[str, Any], extents: dict[str, int]) -> tuple[str, ...]:
    return (
        group["name"],
        "a state" if group["kind"] == "state" else f"{copies['unit_tokens']:,}",
        f"{copies['runs']:,}",
        between(*copies["run_nbytes"]),
        f"{extents['count']:,}",
        between(extents["min_nbytes"], extents["max_nbytes"]),
        f"{copies['alignment']:,}",
    )


def _length(tokens: int) -> str:
    return f"{tokens:,}" if tokens % 1024 else f"{tokens // 1024:,}k"


def _context(context: dict[str, Any]) -> tuple[str, ...]:
    return (
        _length(context["tokens"]),
        f"{context['blocks']:,}",
        f"{context['nbytes']:,}",
        binary(context["nbytes"]),
        f"{context['runs']:,}",
        duration(context["seconds"]),
    )


def _times(context: dict[str, Any]) -> tuple[str, ...]:
    """Return the length of a context, and the time and path of its load and its store."""
    found = (context[route] for route in ROUTES)
    return _length(context["tokens"]), *(f"{duration(one['seconds'])}, {' + '.join(one['paths'])}" for one in found)


def _better(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the profile of the predicted times, and the better order of each group's host side."""
    yield "times", f"predicted, {facts['profile']}"
    for one in facts["better"]:
        name = f" of {one['group']}" * (len(facts["better"]) > 1)
        if one["notation"] is None:
            yield "better", f"none{name}, of {one['tried']:,} orders of the host side"
            continue
        yield "better", f"{one['notation']}{name}, blocks of {one['block_tokens']:,} tokens"
        times = (
            f"{route} {duration(one['seconds'][route])} instead of {duration(one['now'][route])}" for route in ROUTES
        )
        yield "", f"{_length(one['tokens'])} tokens: {', '.join(times)}"


def _context_to_peer(context: dict[str, Any]) -> tuple[str, ...]:
    peer = context["peer"]
    times = (duration(peer[key]) for key in ("seconds", "kernel_seconds", "host_seconds"))
    return _length(context["tokens"]), f"{peer['runs']:,}", *times


def _context_by_nixl(context: dict[str, Any]) -> tuple[str, ...]:
    peer = context["peer"]
    each, piece = binary(peer["descriptor_nbytes"]), f"up to {binary(peer['piece_nbytes'])}"
    return _length(context["tokens"]), f"{peer['descriptors']:,}", each, f"{peer['pieces']:,}", piece
