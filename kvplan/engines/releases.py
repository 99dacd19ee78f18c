"""The release of an engine whose interface a running version has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """The release that a running version is closest to.

    Attributes:
        release: the one with the same first two numbers, as ``"0.33.0"``; None if there is none.
        exact: whether the running version is that release. A build for a platform, as ``"0.33.0+cpu"``, is.
    """

    release: str | None
    exact: bool


def found(running: str, releases: Sequence[str]) -> Found:
    """Find a running version among releases.

    Args:
        running: version of the engine, as its package says.
        releases: for each pair of first two numbers, one release.

    >>> releases = "0.33.0", "0.32.0"
    >>> found("0.33.0+cpu", releases)
    Found(release='0.33.0', exact=True)
    >>> found("0.32.1.dev7+g0a1b2c3", releases)
    Found(release='0.32.0', exact=False)
    >>> found("0.34.0", releases), found("dev", releases)
    (Found(release=None, exact=False), Found(release=None, exact=False))
    """
    public = running.partition("+")[0]
    for release in releases:
        if _minor(release) == _minor(public):
            return Found(release, _number(public) == _number(release))
    return Found(None, exact=False)


def _minor(version: str) -> str:
    found = re.match(r"v?(\d+\.\d+)(?!\d)", version)
    return found.group(1) if found else version


def _number(version: str) -> str:
    return re.sub(r"(\.0)+$", "", version.removeprefix("v"))
