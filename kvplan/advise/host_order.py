"""Find the best order of a host pool for a layout: by the predicted time of loads, stores, or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvplan.advise.advise import Advice, Tell, advise
from kvplan.advise.contents import Candidate, contents_of
from kvplan.advise.order_specs import spec_of
from kvplan.advise.prices import Pricing
from kvplan.cost.policy import Policy
from kvplan.cost.profile import DeviceProfile
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout

TOKENS = 4096  # of one transfer: the cost per transfer is then small beside the cost per byte and per run


class Wanted(NamedTuple):
    """The pool that is looked for; None stands for what the layout has. More layers make no difference to the order.

    Attributes:
        block_tokens: token slots per block.
        heads: global numbers of its KV heads.
        device: where the pool lies.
        single: whether all parts must be in one allocation.
    """

    block_tokens: int | None = None
    heads: range | None = None
    device: str = "cpu"
    single: bool = False


def pricing_for(
    layout: KVLayout,
    device: str,
    profile: DeviceProfile,
    *,
    directions: Sequence[str] = ("store", "load"),
    tokens: int = TOKENS,
    policy: Policy | None = None,
) -> Pricing | None:
    """Return the pricing of transfers between a layout and a pool; None if the profile has no costs of them.

    Args:
        layout: the layout that does not change.
        device: where the pool lies.
        profile: profile of the device.
        directions: ``"store"`` and ``"load"``, or one of them; only between a device and the host.
        tokens: tokens of one transfer.
        policy: limits of the paths, and the compute that runs at the same time.
    """
    sides = {layout.device == "cpu", device == "cpu"}
    routes = tuple(directions) if len(sides) == 2 else ("device",) if False in sides else ("host",)
    if not set(routes) <= set(profile.costs):
        return None
    return Pricing(profile, routes, tokens, policy or Policy())


def host_orders(
    layout: KVLayout,
    pricing: Pricing | None,
    *,
    present: KVLayout | None = None,
    wanted: Wanted = Wanted(),  # noqa: B008  # immutable
    tell: Tell | None = None,
) -> Advice:
    """Return the best orders of a pool that holds a layout's content.

    Args:
        layout: the layout that does not change, such as an engine's cache.
        pricing: the transfers whose time counts; None to count runs and extents only.
        present: the pool's present layout; only orders that take less time are returned.
        wanted: the pool, if there is no present layout. With one, only ``block_tokens`` and ``single``
            count.
        tell: called with the share of the work that is done, and a text.

    Raises:
        LayoutError: a part differs between layers, so that no order of axes holds all of them.

    >>> from kvplan.cost.profile import default
    >>> spec = {"notation": "layer: kv block head dim.0 token dim.1", "device": "cuda:0",
    ...         "sizes": {"layer": 32, "block": 64, "token": 16, "head": 8, "dim": 128, "dim.1": 8}}
    >>> gpu = KVLayout.from_spec(spec)
    >>> best = host_orders(gpu, pricing_for(gpu, "cpu", default()), wanted=Wanted(block_tokens=64)).orders[0]
    >>> best.notation, best.block_tokens, best.numbers.run_nbytes
    ('block token.0 layer kv head dim.0 token.1 dim.1', 64, (32768, 32768))
    """
    mine = plain_pool(layout, wanted) if present is None else present
    tokens = mine.block_tokens if wanted.block_tokens is None else wanted.block_tokens
    sizes = (1,) if mine.opaque else (tokens,)
    return advise(
        layout, mine, "dst", pricing=pricing, sizes=sizes, compare=present is not None, single=wanted.single, tell=tell
    )


def plain_pool(layout: KVLayout, wanted: Wanted) -> KVLayout:
    """Return a pool without memory that holds a layout's content in a plain order.

    Raises:
        LayoutError: a part differs between layers, so that no order of axes holds all of them.
    """
    held = contents_of(layout)
    if not held:
        raise LayoutError(
            "parts differ between layers, so no order holds all of them: give the layers of one kind, by "
            "layout.slice(layers=...), or a spec for each kind"
        )
    tokens = 1 if layout.opaque else wanted.block_tokens or layout.block_tokens
    dims = []
    for one in held:
        content = one if wanted.heads is None or one.heads is None else one._replace(heads=wanted.heads)
        named = [("block", 1), ("layer", 1), *((("kv", 2),) if one.kv else ())]
        named += [] if one.opaque else [("token", tokens)]
        named += [] if content.heads is None else [("head", len(content.heads))]
        dims.append((content, (*named, ("dim", one.nbytes))))
    spec = spec_of(Candidate(tuple(dims), tokens, 0), layout, layout.layers)
    for one_spec in spec.get("layouts", [spec]):
        one_spec["device"] = wanted.device
    return KVLayout.from_spec(spec)
