"""``kvplan inspect --model``: the size of a model's cache and how it would move, without tensors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from math import gcd
from typing import Any, NamedTuple

from kvplan.advise.host_order import host_orders
from kvplan.advise.prices import Price, Pricing
from kvplan.base.numbers import duration
from kvplan.base.quoting import quoted
from kvplan.catalogue.config import read_config
from kvplan.catalogue.layouts import STATE, choose, layout_for
from kvplan.catalogue.models import Group, Model, find_model, models
from kvplan.cli.answer import Answer, Part, facts, table, words
from kvplan.cli.arguments import add_shared, context_lengths, positive, rate
from kvplan.cli.screen import pictures
from kvplan.cost.policy import Policy
from kvplan.cost.store import profile_of
from kvplan.errors import KVPlanError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.plan.plan import Plan, unite
from kvplan.program.program import Extents

CONTEXTS = (1024, 32768, 131072)  # tokens
LINK_GBPS = 55.1  # measured: one large copy from host to device, H100 on PCIe Gen5 x16
# A kernel's share of the rate of one large copy, for runs of 256 bytes or more: two H200s, NVLink (gpu-to-gpu.md).
KERNEL_SHARE = 0.94
ROUTES = ("load", "store")
# The rate of one large copy, and the name of the link; NIXL's wire is not known.
LINKS = {
    "nvlink": (390.0, "NVLink 4 of H100 and H200"),  # measured: two H200s, 18 links (docs/guides/gpu-to-gpu.md)
    "pcie": (50.0, "PCIe 5 x16, assumed"),  # about 0.8 of the 63 GB/s of its lanes, not measured
    "nixl": (None, "NIXL"),
}
OPTIONS = {
    "engine": "vllm", "host": "", "tp": 1, "block_tokens": 16, "host_block_tokens": None, "blocks": 1024,
    "link_gbps": LINK_GBPS, "contexts": CONTEXTS, "peer": None, "peer_layout": None, "peer_block_tokens": None,
    "profile": None, "overlap": "idle",
}  # fmt: skip


class ModelFacts(Part, sources=(Model,), names="name layers source verified note"):
    """A model of the catalogue, or of a config."""

    def __str__(self) -> str:
        checked = "" if self.verified else " (from memory, not verified)"
        return f"{self.name}, {self.layers} layers\n{self.source}{checked}" + f"\n{self.note}" * bool(self.note)


class Moves(Part, sources=(CopyProgram,), names="unit_tokens unit_nbytes runs run_nbytes extents alignment"):
    """The copies of a unit.

    Attributes:
        extents: contiguous byte ranges of a unit on the side that receives.
    """

    extents: Extents


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
        peer: the copies of a unit to the other GPU; absent without one.
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
    peer: Moves | None = None


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
        peer: the way to the other GPU: runs, and seconds of one large copy, by a kernel and through the host; or, by
            NIXL, descriptors and pieces if it is packed, with the bytes of each. Absent without one.
    """

    shown = "tokens, blocks, nbytes, runs, at the link: seconds, load, store"
    tokens: int
    blocks: int
    nbytes: int
    runs: int
    seconds: float
    load: Timed
    store: Timed
    peer: dict[str, float] | None = None


class Better(Part):
    """The better order of the host side of a group.

    Attributes:
        group: its name.
        tokens: of the request whose times count.
        tried: number of orders.
        now: seconds of the present order, by route.
        notation: the better order; null if there is none.
        block_tokens: its tokens a block.
        seconds: its seconds, by route.
    """

    shown = "group, orders tried: tried, better: notation, blocks of: block_tokens, seconds"
    group: str
    tokens: int
    tried: int
    now: dict[str, float] | None
    notation: str | None
    block_tokens: int | None
    seconds: dict[str, float] | None


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
        better: the better orders of the host side; none with --no-advice.
        peer: the other GPU: name, notation and block tokens of its layout, the link, and its GB/s of one large copy
            and of a kernel, which NIXL has not. Absent without one.
    """

    schema = "inspect-model/1"
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
    better: tuple[Better, ...]
    peer: dict[str, Any] | None = None
    picture: Any = field(default=None, kw_only=True)

    def blocks(self) -> Iterable[Any]:
        """Return the facts, the groups and their copies, the requests, the better orders, and the way to the peer."""
        host = "group: name, unit_tokens, runs, run_nbytes, host_extents, alignment"
        yield from (facts(self), table(self.groups), table(self.groups, host), table(self.contexts))
        yield from [table(self.better)] if self.better else []
        if self.peer is not None:
            moves = "group: name, peer.unit_tokens, peer.runs, peer.run_nbytes, peer.extents, peer.alignment"
            columns = {name.replace("_", " "): _way(name) for name in self.contexts[0].peer or {}}
            yield from (table(self.groups, moves), table(self.contexts, {"tokens": "tokens", **columns}))
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


def add_arguments(parser: Any) -> None:
    """Add the arguments of a model; :data:`OPTIONS` has what they are if they are not given."""
    add = parser.add_argument
    add("--engine", metavar="NAME", help="an engine, a device layout of the catalogue, or a notation (default vllm)")
    add("--host", metavar="NAME", help="a host layout of the catalogue, or a notation (default page-first)")
    add("--tp", type=positive, metavar="N", help="tensor-parallel ranks (default 1)")
    add("--block-tokens", type=positive, metavar="N", help="of the device (default 16)")
    add("--host-block-tokens", type=positive, metavar="N", help="of the host (default: as on the device)")
    add("--blocks", type=positive, metavar="N", help="on the device (default 1024)")
    add("--link-gbps", type=rate, metavar="GB/S", help=f"of the link, in 10^9 bytes a second (default {LINK_GBPS})")
    lengths = "tokens of requests; 32k is 32,768 (default 1k,32k,128k)"
    add("--contexts", "--tokens", type=context_lengths, metavar="N,...", help=lengths)
    links = "nvlink or pcie, the GB/s of one large copy; or nixl: descriptors of a prompt, and pieces if packed"
    add("--peer", type=link, metavar="LINK", help=f"also to another GPU: {links}")
    add("--peer-layout", metavar="NAME", help="on that GPU, as for --engine (default: as --engine)")
    add("--peer-block-tokens", type=positive, metavar="N", help="on that GPU (default: as on the device)")
    add_shared(parser, "--profile", "--overlap", "--advice")


def link(text: str) -> tuple[float | None, str]:
    """Read a link between two GPUs: a word, or the rate of one large copy in GB/s.

    >>> link("nvlink")[0], link("150")
    (390.0, (150.0, 'as given'))
    """
    if text.lower() in LINKS:
        return LINKS[text.lower()]
    try:
        return rate(text), "as given"
    except argparse.ArgumentTypeError:
        expected = f"give {', '.join(map(repr, LINKS))}, or a rate in GB/s above 0"
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a link between GPUs; {expected}") from None


def run(args: argparse.Namespace) -> Answer:
    """Return the facts of a model's cache, or the models of the catalogue."""
    if args.model == "":
        groups = {one.name: tuple(group.name for group in one.groups) for one in models().values()}
        return ModelsAnswer(tuple(ModelName.of(one, groups=groups[one.name]) for one in models().values()))
    cache = Cache(find_model(args.model) if args.config is None else read_config(args.config), args)
    return cache.answer(pictures(args, cache.sides[cache.first].device))


class Side(NamedTuple):
    """The layouts of one rank and cache group, and the programs between them.

    Attributes:
        group: the cache group.
        device, host: layouts.
        programs: from the device to the host ("store"), back ("load"), and to the other GPU ("peer") if there is one.
        rows: rows of a device block.
    """

    group: Group
    device: KVLayout
    host: KVLayout
    programs: dict[str, CopyProgram]
    rows: int


class Cache:
    """The caches of a model on a device and a host, by the arguments of the command."""

    def __init__(self, model: Model, args: argparse.Namespace) -> None:
        growing = [k for k, group in enumerate(model.groups) if group.kind != "state"]
        if not growing:
            raise KVPlanError(f"{model.name} has no layer with attention, so no tokens to count")
        for name, value in (("peer-layout", args.peer_layout), ("peer-block-tokens", args.peer_block_tokens)):
            if args.peer is None and value is not None:
                raise KVPlanError(f"--{name} needs --peer, the link to the other GPU: {' or '.join(LINKS)}, or GB/s")
        given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
        self.asked = asked = argparse.Namespace(**(OPTIONS | given), dtype=args.dtype or "bf16", advice=args.advice)
        self.model, self.first, kind = model, growing[0], model.groups[growing[0]].kind
        self.named = {"device": choose(asked.engine, "--engine", kind), "host": choose(asked.host, "--host", kind),
                      "peer": choose(asked.peer_layout or asked.engine, "--peer-layout", kind)}  # fmt: skip
        self.tokens = {"device": asked.block_tokens, "host": asked.host_block_tokens or asked.block_tokens,
                       "peer": asked.peer_block_tokens or asked.block_tokens}  # fmt: skip
        self.profile, self.where = profile_of(asked.profile)
        self.policy = Policy(overlap=asked.overlap)
        self.sides = [self._side(group) for group in model.groups]

    def _layout(self, group: Group, side: str, blocks: int) -> KVLayout:
        """Return one rank's layout. Not of rank 0: its heads are first in a shared pool, and so are better aligned."""
        named, tp, state = self.named[side], self.asked.tp, group.kind == "state"
        rows, rows_here = (1, 1) if state else (self.asked.block_tokens, self.tokens[side])
        return layout_for(STATE[named.side] if state else named, group, dtype=self.asked.dtype, tp=tp,
                          rank=min(tp - 1, 1), num_blocks=-(-blocks * rows // rows_here), block_tokens=rows_here,
                          device="cuda:1" if side == "peer" else None)  # fmt: skip

    def _side(self, group: Group) -> Side:
        device, host = (self._layout(group, side, self.asked.blocks) for side in ("device", "host"))
        programs = {"store": compile_quietly(device, host), "load": compile_quietly(host, device)}
        if self.asked.peer is not None:
            programs["peer"] = compile_quietly(device, self._layout(group, "peer", self.asked.blocks))
        return Side(group, device, host, programs, 1 if group.kind == "state" else self.asked.block_tokens)

    def answer(self, picture: Any = None) -> ModelAnswer:
        """Return every fact of the caches."""
        groups = tuple(map(self._group, self.sides))
        # Groups share tokens, so their bytes add up. States do not grow with tokens.
        token = sum(group.token_nbytes or 0 for group in groups)
        kept = sum(group.token_nbytes or 0 for group in groups if group.window is None)
        state = sum(group.block_nbytes for group in groups if group.kind == "state")
        ranks = [{"rank": nbytes, "all": nbytes * self.asked.tp} for nbytes in (token, kept, state)]
        peer = None
        if self.asked.peer is not None:
            gbps, link = self.asked.peer
            rates = {"link_gbps": gbps, "kernel_gbps": gbps * KERNEL_SHARE} if gbps else {}
            peer = self._named("peer") | {"block_tokens": self.tokens["peer"], "link": link} | rates
        return ModelAnswer.of(
            self.asked,
            model=ModelFacts.of(self.model),
            host_block_tokens=self.tokens["host"],
            device=self._named("device"),
            host=self._named("host"),
            token_nbytes=ranks[0],
            kept_token_nbytes=ranks[1],
            state_nbytes=ranks[2] if state else None,
            groups=groups,
            contexts=tuple(self._context(tokens, groups) for tokens in self.asked.contexts),
            profile=self.where or f"as on {self.profile.kind}",
            better=tuple(map(self._better, self.sides)) if self.asked.advice else (),
            peer=peer,
            picture=picture,
        )

    def _named(self, side: str) -> dict[str, Any]:
        return {"layout": self.named[side].name, "notation": self.named[side].notation}

    def _group(self, side: Side) -> GroupFacts:
        group, program, tp = side.group, side.programs["store"], self.asked.tp
        elements, dtype = group.stored_as(self.asked.dtype)
        row_nbytes = side.device.block_nbytes // side.rows
        whole, left = divmod(row_nbytes, group.row_tokens)
        token: float = row_nbytes / group.row_tokens if left else whole
        peer = side.programs.get("peer")
        return GroupFacts.of(
            group,
            program,
            rank_heads=len(group.rank_heads(tp)),
            copies=group.copies(tp),
            dim=group.rank_share(elements, tp),
            dtype=dtype,
            row_nbytes=row_nbytes,
            token_nbytes=None if group.kind == "state" else token,
            block_nbytes=side.device.block_nbytes,
            host_extents=program.program.extents("dst"),
            peer=None if peer is None else Moves.of(peer, extents=peer.program.extents("dst")),
        )

    def _context(self, tokens: int, groups: Sequence[GroupFacts]) -> Context:
        held = [(side, side.group.rows_held(tokens, self.asked.block_tokens)) for side in self.sides]
        runs = {to: sum(rows // side.programs[to].unit_tokens * side.programs[to].runs for side, rows in held)
                for to in self.sides[0].programs}  # fmt: skip
        nbytes = sum(rows * group.row_nbytes for group, (_, rows) in zip(groups, held, strict=True))
        programs = [({route: side.programs[route].program for route in ROUTES}, rows) for side, rows in held]
        prices = [self._pricing(rows).of(both) for both, rows in programs]
        load, store = (Timed(sum(price.routes[route].wall for price in prices),
                             tuple(dict.fromkeys(price.routes[route].path for price in prices)))
                       for route in ROUTES)  # fmt: skip
        link_seconds, peer = nbytes / (self.asked.link_gbps * 1e9), None
        if self.asked.peer is not None:
            gbps = self.asked.peer[0]
            seconds = gbps and nbytes / (gbps * 1e9)
            peer = _by_nixl([self._prompt(side.group, rows) for side, rows in held]) if not seconds else {
                "runs": runs["peer"], "seconds": seconds, "kernel_seconds": seconds / KERNEL_SHARE,
                "host_seconds": 2 * link_seconds}  # fmt: skip
        return Context(tokens, sum(rows // side.rows for side, rows in held), nbytes, runs["store"], link_seconds, load,
                       store, peer)  # fmt: skip

    def _pricing(self, tokens: int) -> Pricing:
        return Pricing(self.profile, ROUTES, tokens, self.policy)

    def _better(self, side: Side) -> Better:
        """Return the better order of the host side, for the longest request."""
        longest = max(self.asked.contexts)
        pricing = self._pricing(side.group.rows_held(longest, self.asked.block_tokens))
        try:
            advice = host_orders(side.device, pricing, present=side.host)
        except LayoutError:  # parts differ between layers
            return Better(side.group.name, longest, 0, None, None, None, None)
        best = advice.orders[0] if advice.orders else None
        order = (None, None, None) if best is None else (best.notation, best.block_tokens, _seconds(best.price))
        return Better(side.group.name, longest, advice.tried, _seconds(advice.price), *order)

    def _prompt(self, group: Group, rows: int) -> Plan:
        """Plan a request of one group, whose blocks are scattered over pools of twice their number."""
        here, there = (1, 1) if group.kind == "state" else (self.tokens["device"], self.tokens["peer"])
        pools = [self._layout(group, side, 2 * rows // here + there) for side in ("device", "peer")]
        src, dst = (scattered(-(-rows // rows_here), pool.num_blocks)
                    for rows_here, pool in zip((here, there), pools, strict=True))  # fmt: skip
        return compile_quietly(*pools).plan(src, dst[::-1])


def _way(name: str) -> Callable[[Any], str]:
    return lambda context: words(name, context.peer[name], cell=True)


def _seconds(price: Price | None) -> dict[str, float] | None:
    return None if price is None else {route: one.wall for route, one in price.routes.items()}


def _by_nixl(plans: Sequence[Plan]) -> dict[str, float]:
    """Return the descriptors of a prompt over NIXL, and its pieces if it is packed; a plan for each cache group."""
    from kvplan.agents.packed.ring import GPU_SLOTS
    from kvplan.cost.wires.wire_model import crossing_of
    from kvplan.plan.chunks import Chunks, outlines_of

    whole = unite(plans)  # of layouts without memory, whose addresses may be the same
    descriptors = sum(crossing_of(plan).descriptors for plan in plans)
    pieces = len(Chunks(outlines_of(whole), GPU_SLOTS.nbytes).chunks)
    return {"descriptors": descriptors, "descriptor_nbytes": whole.nbytes // max(descriptors, 1), "pieces": pieces,
            "piece_nbytes": GPU_SLOTS.nbytes}  # fmt: skip


def scattered(count: int, pool: int) -> list[int]:
    """Return block ids in a pool that is used up: no two that follow each other are neighbours in the pool.

    >>> scattered(4, 8), scattered(2, 4)
    ([0, 5, 2, 7], [0, 3])
    """
    step = max(int(pool * 0.618), 1)
    while gcd(step, pool) > 1:
        step += 1
    return [block * step % pool for block in range(count)]
