"""When transfers between machines are packed, as a variable or an argument says."""

from __future__ import annotations

import os
from typing import NamedTuple

from kvplan.agents.packed.ring import Slots, checked_slots
from kvplan.base.quoting import quoted
from kvplan.errors import KVPlanError

VARIABLE = "KVPLAN_NIXL_PACKED"
AUTO, ALWAYS, NEVER = CHOICES = ("auto", "always", "never")


class PackedOptions(NamedTuple):
    """The options of packed transfers.

    Attributes:
        when: ``"auto"``: where a model of the wire says that packing is faster. ``"always"``: wherever it is possible,
            also within a machine. ``"never"``: nowhere.
        slots: the ring, or None for one that fits its device.
    """

    when: str = AUTO
    slots: Slots | None = None


def packed_options(when: object, slots: object, *, own: bool) -> PackedOptions:
    """Return the options of an agent.

    Args:
        when: an argument of the user's, or None for what the variable ``KVPLAN_NIXL_PACKED`` says.
        slots: (number of slots, bytes of a slot), or None.
        own: whether kvplan makes NIXL's agent. A caller's agent may refuse calls of two threads at a time, so without
            an argument nothing is packed over it.

    Raises:
        KVPlanError: a value is unknown.

    >>> packed_options("always", (8, 4096), own=False)
    PackedOptions(when='always', slots=Slots(number=8, nbytes=4096))
    >>> packed_options(None, None, own=False).when
    'never'
    """
    told = when
    if when is None:
        told = (os.environ.get(VARIABLE) or AUTO) if own else NEVER
    if told not in CHOICES:
        raise KVPlanError(f"{'packed' if when is not None else VARIABLE} is {quoted(told)}; expected one of "
                          f"{', '.join(map(repr, CHOICES))}")  # fmt: skip
    return PackedOptions(str(told), checked_slots(slots))
