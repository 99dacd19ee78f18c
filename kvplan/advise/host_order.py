"""Find the best order of a host pool for a layout: by the predicted time of loads, stores, or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvplan.advise.advise import Advice, Tell, advise, search
from kvplan.advise.order_specs import Pool
from kvplan.advise.prices import Pricing
from kvplan.cost.policy import Policy
from kvplan.cost.profile import DeviceProfile
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

    >>> from kvplan.cost.profile import default
    >>> spec = {"notation": "layer: kv block head dim.0 token dim.1", "device": "cuda:0",
    ...         "sizes": {"layer": 32, "block": 64, "token": 16, "head": 8, "dim": 128, "dim.1": 8}}
    >>> gpu = KVLayout.from_spec(spec)
    >>> best = host_orders(gpu, pricing_for(gpu, "cpu", default()), wanted=Wanted(block_tokens=64)).orders[0]
    >>> best.notation, best.block_tokens, best.numbers.run_nbytes
    ('block token.0 layer kv head dim.0 token.1 dim.1', 64, (32768, 32768))
    """
    if present is not None:
        tokens = present.block_tokens if wanted.block_tokens is None else wanted.block_tokens
        return advise(layout, present, "dst", pricing=pricing, sizes=(tokens,), single=wanted.single, tell=tell)
    tokens = layout.block_tokens if wanted.block_tokens is None else wanted.block_tokens
    pool = Pool(wanted.device, layout.num_blocks * layout.block_tokens, wanted.heads)
    return search(layout, pool, (tokens,), "dst", pricing, single=wanted.single, tell=tell)
