"""``kvplan pairs``: print how every device layout of the catalogue moves to every host layout of the same cache."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from kvplan.base.quoting import quoted
from kvplan.catalogue.layouts import NamedLayout, layout_for, named_layouts
from kvplan.catalogue.models import Group, find_model
from kvplan.cli.answer import Answer, Part, Table, table
from kvplan.cli.screen import Tell
from kvplan.errors import IncompatibleLayoutsError, KVPlanError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.program.program import Extents

HOST_TOKENS = (16, 64)
NUM_BLOCKS = 1024
HOLDS = {"mha": "K and V of each head", "mla": "one latent row a token"}
UNIT = "unit_tokens unit_nbytes runs run_nbytes host_extents alignment"


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
    def group(self) -> Group:
        """Its layers, heads and rows."""
        return find_model(self.name).groups[0]

    def layout(self, named: NamedLayout, tokens: int, tp: int, device: str) -> KVLayout:
        """Return a rank's layout. Not of rank 0: its heads are first in a pool, and so are better aligned."""
        return layout_for(named, self.group, num_blocks=NUM_BLOCKS, block_tokens=tokens, dtype="bf16", tp=tp,
                          rank=min(tp - 1, 1), device=device)  # fmt: skip


REFERENCES = (
    Reference("llama-3.1-70b", tp=4, block_tokens=16, pools=(4, 1)),
    Reference("deepseek-v3", tp=1, block_tokens=64, pools=(1,)),
)


class ModelFacts(Part, sources=(Group, Reference), names="name kind layers heads dim dtype tp block_tokens"):
    """A reference model.

    Attributes:
        layers: their number.
        dtype: of the cache.
    """

    layers: int
    dtype: str


class LayoutFacts(Part, sources=(NamedLayout,), names="name side kind notation source"):
    """A layout of the catalogue."""


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
        models: that stand for each kind of cache.
        layouts: of the catalogue.
        pairs: of a device and a host layout.
    """

    schema = "pairs/1"
    models: tuple[ModelFacts, ...]
    layouts: tuple[LayoutFacts, ...]
    pairs: tuple[Pair, ...]

    def blocks(self) -> Iterator[Any]:
        """Yield a table for each pool of each model."""
        notations = {layout.name: layout.notation for layout in self.layouts}
        for model in self.models:
            yield Table([("model", str(model))])
            pairs = [pair for pair in self.pairs if pair.model == model.name]
            for (host, tokens, tp), some in groupby(
                pairs, key=lambda pair: (pair.host, pair.host_block_tokens, pair.host_tp)
            ):
                yield Table(
                    [("host", f"{host}, {tokens} tokens, {f'TP {tp}' if tp > 1 else 'whole model'}\n{notations[host]}")]
                )
                yield table(some)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "examples:\n  kvplan pairs --device vllm-LBHNC --host page-first"
    parser.add_argument("--device", metavar="NAME", help="this device layout only")
    parser.add_argument("--host", metavar="NAME", help="this host layout only")


def run(args: argparse.Namespace, tell: Tell) -> PairsAnswer:
    """Return the pairs; a finding if a pair of one kind is refused."""
    tell(None, "compiling every pair")
    devices, hosts = _side("device", args.device), _side("host", args.host)
    pairs = tuple(pair for reference in REFERENCES for pair in _pairs(reference, devices, hosts))
    if not pairs:
        (one,), (other,) = devices, hosts
        raise IncompatibleLayoutsError(
            f"{one.name!r} holds {HOLDS[one.kind]} and {other.name!r} {HOLDS[other.kind]}: these are different caches, "
            "and each lacks the parts of the other"
        )
    used = {pair.model for pair in pairs}
    models = tuple(ModelFacts.of(one, one.group, layers=len(one.group.layers), dtype="bf16")
                   for one in REFERENCES if one.name in used)  # fmt: skip
    layouts = tuple(LayoutFacts.of(named) for named in (*devices, *hosts))
    refused = any(pair.refused for pair in pairs)
    return PairsAnswer(models, layouts, pairs, status=int(refused))


def _side(side: str, name: str | None) -> list[NamedLayout]:
    layouts = {layout.name: layout for layout in named_layouts().values() if layout.side == side}
    if name is None:
        return list(layouts.values())
    if name not in layouts:
        names = ", ".join(layouts)
        raise KVPlanError(f"--{side} {quoted(name)} is not a {side} layout of the catalogue; it has {names}")
    return [layouts[name]]


def _pairs(reference: Reference, devices: list[NamedLayout], hosts: list[NamedLayout]) -> Iterator[Pair]:
    kind = reference.group.kind
    caches = [(one.name, reference.layout(one, reference.block_tokens, reference.tp, "cuda:0"))
              for one in devices if one.kind == kind]  # fmt: skip
    for host in (host for host in hosts if host.kind == kind):
        # A pool that is sharded over all ranks is already a pool of the whole model.
        for tp in (reference.tp,) if "tp" in host.split.values() else reference.pools:
            for tokens in HOST_TOKENS:
                pool = reference.layout(host, tokens, tp, "cpu")
                for name, cache in caches:
                    yield _pair(cache, pool, device=name, model=reference.name, host=host.name,
                                host_block_tokens=tokens, host_tp=tp)  # fmt: skip


def _pair(src: KVLayout, dst: KVLayout, **names: Any) -> Pair:
    """Return the copies of a unit between two layouts, or the reason why the pair is refused."""
    try:
        compiled = compile_quietly(src, dst)
    except IncompatibleLayoutsError as error:
        return Pair.of(refused=" ".join(str(error).split()), **dict.fromkeys(UNIT.split()), **names)
    return Pair.of(compiled, refused=None, host_extents=compiled.program.extents("dst"), **names)
