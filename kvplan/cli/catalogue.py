"""``kvplan inspect`` and ``pairs``: a layout, caches of known models, and how known layouts move, without tensors."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import field, replace
from itertools import groupby, product
from typing import Any, NamedTuple

from kvplan.advise.advise import advise
from kvplan.base.numbers import duration
from kvplan.base.values import quoted
from kvplan.catalogue.config import read_config
from kvplan.catalogue.layouts import BESIDE, NamedLayout, choose, layout_for, named_layouts
from kvplan.catalogue.models import Group, Model, find_model, models
from kvplan.cli.arguments import SOURCE, add_layout, add_shared, amounts, positive, rate, read_layout
from kvplan.cli.layouts import LayoutAnswer, add_pictures, pictures
from kvplan.cli.pair import AdviceFacts
from kvplan.cli.screen import Answer, Part, Table, Tell, facts, table
from kvplan.cost.model import candidates
from kvplan.cost.policy import Policy
from kvplan.cost.profile import DeviceProfile
from kvplan.cost.statistics import facts_of
from kvplan.cost.store import profile_of
from kvplan.errors import IncompatibleLayoutsError, KVPlanError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.program.program import Extents

# Defaults; the link's was measured: one large copy from host to device, H100 on PCIe Gen5 x16.
OPTIONS = {
    "engine": "vllm", "host": "", "tp": 1, "block_tokens": 16, "host_block_tokens": None, "blocks": 1024,
    "link_gbps": 55.1, "contexts": (1024, 32768, 131072), "profile": None, "overlap": "idle",
}  # fmt: skip


class ModelFacts(Part, sources=(Model,), names="name layers source verified note"):
    """A model of the catalogue, or of a config."""

    def __str__(self) -> str:
        checked = "" if self.verified else " (not verified)"
        return f"{self.name}, {self.layers} layers\n{self.source}{checked}" + f"\n{self.note}" * bool(self.note)


GROUP = ("name kind layers heads rank_heads copies dim dtype window row_tokens row_nbytes token_nbytes block_nbytes "
         "unit_tokens unit_nbytes runs run_nbytes host_extents alignment")  # fmt: skip


class GroupFacts(Part, sources=(Group, CopyProgram), names=GROUP):
    """A cache group: layers with the same kind of cache.

    Attributes:
        heads: KV heads over all ranks.
        rank_heads: KV heads of one rank.
        copies: ranks that hold each head.
        dim: elements of a row on one rank.
        row_nbytes: bytes of a row in all layers.
        token_nbytes: bytes a token; null for a state.
        block_nbytes: bytes of a device block in all layers.
        host_extents: contiguous byte ranges of a unit on the host.
    """

    shown = (
        "name, layers, heads a rank: rank_heads, row: dim, dtype, window, a token: token_nbytes, a block: block_nbytes"
    )
    rank_heads: int
    copies: int
    row_nbytes: int
    token_nbytes: float | None
    block_nbytes: int
    host_extents: Extents


class Timed(Part):
    """A predicted transfer.

    Attributes:
        seconds: by the best path.
        paths: the path of each group of layers.
    """

    seconds: float
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"{duration(self.seconds)}, {' + '.join(self.paths)}"


class Context(Part):
    """A request, in whole device blocks of one rank.

    Attributes:
        tokens: its tokens.
        blocks: device blocks.
        nbytes: bytes that it holds and moves.
        runs: contiguous copies.
        seconds: at the link.
        load, store: predicted.
    """

    shown = "tokens, blocks, nbytes, runs, at the link: seconds, load, store"
    tokens: int
    blocks: int
    nbytes: int
    runs: int
    seconds: float
    load: Timed
    store: Timed


class ModelAnswer(Answer):
    """The size of a model's cache, and its times on a link.

    Attributes:
        model: the model.
        dtype: of the cache.
        tp: tensor-parallel ranks.
        block_tokens, host_block_tokens: tokens a block, on the device and on the host.
        device, host: name and notation of their layouts.
        token_nbytes: bytes a token, of one rank and of all.
        kept_token_nbytes: bytes a token of a long context, past all windows.
        state_nbytes: bytes of the states of a request; null if there are none.
        groups: cache groups.
        link_gbps: assumed rate of a rank's link.
        contexts: requests.
        profile: whose costs predict the times.
        better: by the name of a group, better orders of the host side; none with --no-advice.
    """

    schema = "inspect-model/2"
    model: ModelFacts
    dtype: str
    tp: int
    block_tokens: int
    host_block_tokens: int
    device: dict[str, str]
    host: dict[str, str]
    token_nbytes: dict[str, float]
    kept_token_nbytes: dict[str, float]
    state_nbytes: dict[str, float] | None
    groups: tuple[GroupFacts, ...]
    link_gbps: float
    contexts: tuple[Context, ...]
    profile: str
    better: dict[str, AdviceFacts]
    picture: str | None = field(default=None, kw_only=True)
    shown = ("model, dtype, tp, block_tokens, host_block_tokens, device, host, token_nbytes, kept_token_nbytes, "
             "state_nbytes, link_gbps, profile")  # fmt: skip

    def blocks(self) -> Iterable[Any]:
        """Return the facts, the groups and their copies, the requests, and the better orders."""
        host = "group: name, unit_tokens, runs, run_nbytes, host_extents, alignment"
        yield from (facts(self), table(self.groups), table(self.groups, host), table(self.contexts))
        for _, some in groupby(self.better.items(), key=lambda named: [order.notation for order in named[1].compared]):
            (name, advice), *others = some
            alike = f"; {', '.join(other for other, _ in others)} alike" * bool(others)
            yield f"orders of the host, {name}{alike}"
            yield from advice.blocks("the host's order")
        yield from [] if self.picture is None else [self.picture]


class ModelName(Part, sources=(Model,), names="name layers groups source verified"):
    """A model of the catalogue.

    Attributes:
        groups: names of its cache groups.
    """

    shown = "name, layers, groups"
    groups: tuple[str, ...]


class ModelsAnswer(Answer):
    """The models of the catalogue.

    Attributes:
        models: in order of the catalogue.
    """

    schema = "models/1"
    models: tuple[ModelName, ...]


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command; :data:`OPTIONS` has what those of a model are if they are not given."""
    parser.epilog = """examples:
  kvplan inspect examples/specs/gpu_split_kv.toml --picture --svg block.svg
  kvplan inspect --model llama-3.1-70b --engine vllm --tp 4 --host page-first
  kvplan inspect --config path/to/config.json --block-tokens 64"""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("layout", metavar="SPEC", nargs="?", help=SOURCE)
    source.add_argument("--model", nargs="?", const="", metavar="NAME", help="of the catalogue; without NAME, list all")
    source.add_argument("--config", metavar="FILE", help="a config.json of Hugging Face")
    add_layout(parser.add_argument_group("of a SPEC"))
    add_pictures(parser.add_argument_group("pictures"))
    model = parser.add_argument_group("of a model")
    add = model.add_argument
    add("--engine", metavar="NAME", help="an engine, a device layout of the catalogue, or a notation (default vllm)")
    add("--host", metavar="NAME", help="a host layout of the catalogue, or a notation (default page-first)")
    add("--tp", type=positive, metavar="N", help="tensor-parallel ranks (default 1)")
    add("--block-tokens", type=positive, metavar="N", help="of the device (default 16)")
    add("--host-block-tokens", type=positive, metavar="N", help="of the host (default: as on the device)")
    add("--blocks", type=positive, metavar="N", help="on the device (default 1024)")
    add("--link-gbps", type=rate, metavar="GB/S", help="of the link, in 10^9 bytes a second (default 55.1)")
    lengths = "tokens of requests; 32k is 32,768 (default 1k,32k,128k)"
    add("--contexts", "--tokens", type=amounts, metavar="N,...", help=lengths)
    add("--strict", action="store_true", help="refuse a --config with keys that are not understood")
    add_shared(model, "--profile", "--overlap", "--no-advice")


def run_inspect(args: argparse.Namespace, tell: Tell) -> Answer:
    """Return the facts of a layout or of a model's cache, or the models of the catalogue."""
    if args.layout is args.model is args.config is None:
        raise KVPlanError("the following arguments are required: SPEC, --model or --config; "
                          "see 'kvplan inspect --help'")  # fmt: skip
    foreign, other = (OPTIONS, "--model or --config") if args.layout else (("sizes", "device"), "a SPEC, not a model")
    for option in foreign:
        if getattr(args, option) is not None:
            raise KVPlanError(f"unrecognized arguments: --{option.replace('_', '-')} goes with {other}")
    if args.layout is not None:
        layout = read_layout(args.layout, args.sizes, args.dtype, args.device)
        return replace(LayoutAnswer.read(layout), picture=pictures(args, layout))
    if args.model == "":
        return ModelsAnswer(tuple(ModelName.of(model, groups=tuple(group.name for group in model.groups))
                                  for model in models().values()))  # fmt: skip
    model = find_model(args.model) if args.config is None else read_config(args.config, strict=args.strict)
    growing = [k for k, group in enumerate(model.groups) if group.kind != "state"]
    if not growing:
        raise KVPlanError(f"{model.name} has no layer with attention, so no tokens to count")
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    asked = argparse.Namespace(**(OPTIONS | given), dtype=args.dtype or "bf16", advice=args.advice)
    asked.host_block_tokens = asked.host_block_tokens or asked.block_tokens
    kind = model.groups[growing[0]].kind
    named = choose(asked.engine, "--engine", kind), choose(asked.host, "--host", kind)
    sides = [_side(group, named, asked) for group in model.groups]
    return _answer(model, named, sides, asked, pictures(args, sides[growing[0]].device))


class Side(NamedTuple):
    """The layouts of one rank and cache group, and the programs from the device to the host and back."""

    group: Group
    device: KVLayout
    host: KVLayout
    store: CopyProgram
    load: CopyProgram
    facts: GroupFacts


def _side(group: Group, named: Any, asked: argparse.Namespace) -> Side:
    state = group.kind == "state"
    rows = 1 if state else asked.block_tokens
    layouts = []
    for layout, tokens in zip(named, (rows, 1 if state else asked.host_block_tokens), strict=True):
        # Not of rank 0: its heads are first in a shared pool, and so are better aligned.
        kept = layout if group.kind == layout.kind else BESIDE[group.kind][layout.side]
        layouts.append(layout_for(kept, group, dtype=asked.dtype, tp=asked.tp,
                                  rank=min(asked.tp - 1, 1), num_blocks=-(-asked.blocks * rows // tokens),
                                  block_tokens=tokens))  # fmt: skip
    device, host = layouts
    store, load = compile_quietly(device, host), compile_quietly(host, device)
    elements, dtype = group.stored_as(asked.dtype)
    row_nbytes = device.block_nbytes // rows
    whole, left = divmod(row_nbytes, group.row_tokens)
    shown = GroupFacts.of(
        group,
        store,
        rank_heads=len(group.rank_heads(asked.tp)),
        copies=group.copies(asked.tp),
        dim=group.rank_share(elements, asked.tp),
        dtype=dtype,
        row_nbytes=row_nbytes,
        token_nbytes=None if state else row_nbytes / group.row_tokens if left else whole,
        block_nbytes=device.block_nbytes,
        host_extents=store.program.extents("dst"),
    )
    return Side(group, device, host, store, load, shown)


def _answer(model: Model, named: Any, sides: list[Side], asked: argparse.Namespace, picture: Any) -> ModelAnswer:
    profile, where = profile_of(asked.profile)
    groups = [side.facts for side in sides]
    # Groups share tokens, so their bytes add up. States do not grow with tokens.
    token = sum(group.token_nbytes or 0 for group in groups)
    kept = sum(group.token_nbytes or 0 for group in groups if group.window is None)
    state = sum(group.block_nbytes for group in groups if group.kind == "state")
    ranks = [{"rank": nbytes, "all": nbytes * asked.tp} for nbytes in (token, kept, state)]
    better = {}
    for side in sides if asked.advice else ():
        orders = advise(side.device, side.host, "dst", (side.host.block_tokens,))
        better[side.group.name] = AdviceFacts.read(orders, side.host)
    device, host = ({"layout": one.name, "notation": one.notation} for one in named)
    return ModelAnswer.of(
        asked,
        model=ModelFacts.of(model),
        device=device,
        host=host,
        token_nbytes=ranks[0],
        kept_token_nbytes=ranks[1],
        state_nbytes=ranks[2] if state else None,
        groups=tuple(groups),
        contexts=tuple(_context(tokens, sides, asked, profile) for tokens in asked.contexts),
        profile=where or f"as on {profile.kind}",
        better=better,
        picture=picture,
    )


def _context(tokens: int, sides: list[Side], asked: argparse.Namespace, profile: DeviceProfile) -> Context:
    rows = [side.group.rows_held(tokens, asked.block_tokens) for side in sides]
    nbytes = sum(count * side.facts.row_nbytes for count, side in zip(rows, sides, strict=True))
    units = [count // side.store.unit_tokens for count, side in zip(rows, sides, strict=True)]
    blocks = sum(
        count * side.facts.row_nbytes // side.device.block_nbytes for count, side in zip(rows, sides, strict=True)
    )
    runs = sum(count * side.store.runs for count, side in zip(units, sides, strict=True))
    load, store = (_timed([(getattr(side, route), count) for side, count in zip(sides, units, strict=True)],
                          route, profile, Policy(overlap=asked.overlap)) for route in ("load", "store"))  # fmt: skip
    return Context(tokens, blocks, nbytes, runs, nbytes / (asked.link_gbps * 1e9), load, store)


def _timed(moved: list[tuple[CopyProgram, int]], route: str, profile: DeviceProfile, policy: Policy) -> Timed:
    """Predict the transfer of some units of each program, whose blocks lie in no order."""
    taken = [candidates([(facts_of(group, route), max(units, 1)) for group in program.program.groups],
                        route, profile, policy)[0] for program, units in moved]  # fmt: skip
    return Timed(sum(one.wall for one in taken), tuple(dict.fromkeys(one.path for one in taken)))


HOST_TOKENS = (16, 64)
NUM_BLOCKS = 1024
UNIT = "unit_tokens unit_nbytes runs run_nbytes host_extents alignment"


HOLDS = {"mha": "K and V of each head", "mla": "one latent row a token"}
# Models that stand for their kind of cache: the ranks that share the KV heads, the tokens of a device block, and the
# ranks that share the heads of each host pool; 1 is a pool of the whole model.
REFERENCES: tuple[tuple[str, int, int, tuple[int, ...]], ...] = (
    ("llama-3.1-70b", 4, 16, (4, 1)),
    ("deepseek-v3", 1, 64, (1,)),
)


class Pair(
    Part,
    sources=(CopyProgram,),
    names=f"device model host host_block_tokens host_tp refused {UNIT.replace(' ', '? ')}?",
):
    """A device layout and a host layout, and the copies of a unit.

    Attributes:
        device, host: names of the layouts.
        model: name of the reference model.
        host_block_tokens: tokens of a host block.
        host_tp: ranks that share the heads of the pool.
        refused: why they cannot be compiled, else null; the other numbers are null then.
        host_extents: contiguous byte ranges of a unit on the host.
    """

    shown = "device, runs, run_nbytes, extents: host_extents, alignment, refused"
    device: str
    model: str
    host: str
    host_block_tokens: int
    host_tp: int
    refused: str | None
    host_extents: Extents | None


class PairsAnswer(Answer):
    """How device layouts move to host layouts of the same cache.

    Attributes:
        pairs: of a device and a host layout.
    """

    schema = "pairs/2"
    pairs: tuple[Pair, ...]

    def blocks(self) -> Iterator[Any]:
        """Yield a table for each pool of each model."""
        pools = groupby(self.pairs, key=lambda pair: (pair.model, pair.host, pair.host_block_tokens, pair.host_tp))
        for (model, host, tokens, tp), some in pools:
            whose = f"TP {tp}" if tp > 1 else "whole model"
            yield Table([("model", model), ("host", f"{host}, {tokens} tokens, {whose}"),
                         ("", named_layouts()[host].notation)])  # fmt: skip
            yield table(some)


def add_pairs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "examples:\n  kvplan pairs --device vllm-LBHNC --host page-first"
    parser.add_argument("--device", metavar="NAME", help="this device layout only")
    parser.add_argument("--host", metavar="NAME", help="this host layout only")


def run_pairs(args: argparse.Namespace, tell: Tell) -> PairsAnswer:
    """Return the pairs; a finding if a pair of one kind is refused."""
    tell(None, "compiling every pair")
    devices, hosts = _named("device", args.device), _named("host", args.host)
    pairs = tuple(pair for reference in REFERENCES for pair in _pairs(*reference, devices, hosts))
    if not pairs:
        (device, holds), (host, other) = ((repr(each.name), HOLDS[each.kind]) for each in (*devices, *hosts))
        raise IncompatibleLayoutsError(
            f"{device} holds {holds} and {host} {other}: these are different caches, and each lacks the parts of the "
            "other"
        )
    return PairsAnswer(pairs, status=int(any(pair.refused for pair in pairs)))


def _named(side: str, name: str | None) -> list[NamedLayout]:
    layouts = {layout.name: layout for layout in named_layouts().values() if layout.side == side}
    if name is None:
        return list(layouts.values())
    if name not in layouts:
        names = ", ".join(layouts)
        raise KVPlanError(f"--{side} {quoted(name)} is not a {side} layout of the catalogue; it has {names}")
    return [layouts[name]]


def _pairs(
    model: str, ranks: int, block_tokens: int, pools: tuple[int, ...], devices: list[NamedLayout],
    hosts: list[NamedLayout],
) -> Iterator[Pair]:  # fmt: skip
    group = find_model(model).groups[0]

    def layout(named: NamedLayout, tokens: int, tp: int) -> KVLayout:  # as in _side, not of rank 0
        return layout_for(named, group, num_blocks=NUM_BLOCKS, block_tokens=tokens, dtype="bf16", tp=tp,
                          rank=min(tp - 1, 1))  # fmt: skip

    caches = {each.name: layout(each, block_tokens, ranks) for each in devices if each.kind == group.kind}
    for host in (host for host in hosts if host.kind == group.kind):
        # A pool that is sharded over all ranks is already a pool of the whole model.
        for tp, tokens in product((ranks,) if "tp" in host.split.values() else pools, HOST_TOKENS):
            pool = layout(host, tokens, tp)
            for name, cache in caches.items():
                yield _pair(cache, pool, device=name, model=model, host=host.name, host_block_tokens=tokens, host_tp=tp)


def _pair(src: KVLayout, dst: KVLayout, **names: Any) -> Pair:
    """Return the copies of a unit between two layouts, or the reason why the pair is refused."""
    try:
        compiled = compile_quietly(src, dst)
    except IncompatibleLayoutsError as error:
        return Pair.of(refused=" ".join(str(error).split()), **dict.fromkeys(UNIT.split()), **names)
    return Pair.of(compiled, refused=None, host_extents=compiled.program.extents("dst"), **names)
