"""Which earlier profiles a calibration is averaged with, and of what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.cost.blend import weighed
from kvplan.cost.profile import (
    default,
    default_pair,
    names_of_costs,
)


def test_costs_of_another_number_of_programs_are_not_weighed_in():
    new = replace(default(), gpu="H200", how="calibrated", calibrations=1, ceilings=dict(default().ceilings, load=26.0))
    earlier = replace(new, calibrations=3, ceilings=default().ceilings)
    assert weighed(new, earlier).ceilings["load"] == 24.5
    assert weighed(new, replace(earlier, programs={"load": 4, "store": 2, "device": 864})) == new


@pytest.mark.parametrize("guesses", ["earlier", "new", "both"])
def test_guesses_are_not_weighed_in(guesses):
    """An old file has only a guess of copies within the GPU; a calibration may run out of time before them."""
    guessed = names_of_costs(["device"])
    slow = {
        path: replace(one, seconds=dict.fromkeys(one.seconds, 8.0)) for path, one in default().costs["device"].items()
    }
    new = replace(default(), gpu="H200", how="calibrated", calibrations=1, guessed=guessed * (guesses != "earlier"),
                  ceilings=dict(default().ceilings, load=26.0))  # fmt: skip
    earlier = replace(new, calibrations=3, guessed=guessed * (guesses != "new"), costs={**new.costs, "device": slow},
                      ceilings=dict(default().ceilings, device=1000.0))  # fmt: skip
    made = weighed(new, earlier)
    taken = earlier if guesses == "new" else new
    assert made.costs["device"] == taken.costs["device"]
    assert made.ceilings["device"] == taken.ceilings["device"]
    assert made.ceilings["load"] == 24.5
    assert made.guessed == (guessed if guesses == "both" else ())


def test_pairs_are_weighed_with_the_same_pair_only():
    new = replace(default_pair(), gpu="H200", peer="H200", nvlinks=18, how="calibrated", calibrations=1)
    earlier = replace(new, calibrations=1, ceilings=dict(new.ceilings, push=320.0))
    assert weighed(new, earlier).ceilings["push"] == 310.0
    for other in (replace(earlier, peer="H100"), replace(earlier, nvlinks=12), replace(default(), calibrations=1)):
        assert weighed(new, other) == new
