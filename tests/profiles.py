"""How many examples hypothesis draws: three profiles, chosen by the environment variable HYPOTHESIS_PROFILE.

``ci`` is the default and counts as written; ``fast`` is for a loop of edits, ``deep`` for a night. ``mutants`` draws
a third, and makes no failing example smaller.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

SCALES = {"fast": 0.05, "mutants": 0.3, "ci": 1.0, "deep": 80.0}
LEAST = 5  # examples of any property, whatever the profile
POINTS = {"fast": 3, "mutants": 3, "ci": 8, "deep": 1 << 30}  # of each sweep
DEFAULT = 100  # examples in `ci` of a property that does not say how many

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")


def count(in_ci: int) -> int:
    """The number of examples in this profile of a property that has `in_ci` in ``ci``."""
    return max(LEAST, round(in_ci * SCALES[PROFILE]))


def examples(in_ci: int) -> settings:
    """A decorator: so many examples in ``ci``, in proportion fewer in ``fast`` and more in ``deep``."""
    return settings(max_examples=count(in_ci))


def points(total: int) -> range:
    """The points, counted from 1, at which a sweep interrupts a call: evenly spread, and all of them in ``deep``."""
    return range(1, total + 1, max(total // POINTS[PROFILE], 1))


def load() -> None:
    """Make this profile hypothesis's default."""
    if PROFILE not in SCALES:
        raise ValueError(f"HYPOTHESIS_PROFILE is {PROFILE!r}; it is one of {', '.join(SCALES)}")
    smaller = () if PROFILE == "mutants" else (Phase.shrink, Phase.explain)
    settings.register_profile(
        PROFILE, max_examples=count(DEFAULT), deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.target, *smaller),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    settings.load_profile(PROFILE)
