"""The versions of engines that the adapters were held against, and a check of the version that runs."""

from __future__ import annotations

import logging
import re
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from kvplan.errors import KVPlanError

logger = logging.getLogger("kvplan.engines")
_RELEASE = re.compile(r"\d+(?:\.\d+)*")


class Held(NamedTuple):
    """An engine, and the versions of it that its adapter was held against.

    Attributes:
        name: name of the engine.
        package: name of its package.
        versions: versions whose members the tests use, oldest first. The last one is what the adapter was written for.
        parts: numbers of a version that count; in a version with other further numbers, members stay as they are.
        least: the oldest version that is accepted; None if none is known to differ.
        why: how older versions differ, or all others.
        only: whether all other versions are refused.
    """

    name: str
    package: str
    versions: tuple[str, ...]
    parts: int
    least: str | None = None
    why: str = ""
    only: bool = False

    @property
    def written_for(self) -> str:
        """Return the version that the adapter was written for."""
        return self.versions[-1]


VLLM = Held("vLLM", "vllm", ("0.33.0",), 2, why="its scheduler is used from inside", only=True)
SGLANG = Held("SGLang", "sglang", ("0.5.23",), 3)
LMCACHE = Held("LMCache", "lmcache", ("0.5.6",), 3)
TRANSFORMERS = Held(
    "transformers", "transformers", ("5.21.0", "5.22.0", "5.23.0"), 2, "5.18.0",
    "its continuous batching offloads by other members",
)  # fmt: skip
NIXL = Held("NIXL", "nixl", ("1.5.1",), 2)
ENGINES = (VLLM, SGLANG, LMCACHE, TRANSFORMERS, NIXL)

_warned: set[tuple[Held, str]] = set()


def release(text: str) -> tuple[int, ...] | None:
    """Return the numbers of a version, without what follows them.

    >>> release("5.23.0.dev0"), release("v1.2"), release("unknown")
    ((5, 23, 0), (1, 2), None)
    """
    numbers = _RELEASE.match(text.strip().removeprefix("v"))
    return None if numbers is None else tuple(int(number) for number in numbers[0].split("."))


def check(held: Held, running: str = "") -> None:
    """Check the version of an engine. A version that was not held against is logged, once.

    Args:
        held: the engine.
        running: its version, by default that of the installed package. Without the package there is nothing to check:
            an engine may be imported from elsewhere.

    Raises:
        KVPlanError: the version is known to differ.

    >>> check(VLLM, "0.33.1+cu128")
    >>> check(Held("x", "x", ("2.3",), 2, "2.1", "no such class"), "2.0.1")
    Traceback (most recent call last):
        ...
    kvplan.errors.KVPlanError: x 2.0.1 differs: no such class; kvplan's adapter was held against x 2.3: install x==2.3
    """
    try:
        running = running or version(held.package)
    except PackageNotFoundError:
        return
    number = release(running)
    if number is not None and number[: held.parts] in [(release(each) or ())[: held.parts] for each in held.versions]:
        return
    against = f"kvplan's adapter was held against {held.name} {', '.join(held.versions)}"
    old = number is not None and held.least is not None and number < (release(held.least) or ())
    if held.only or old:
        differs = "differs" if old else "may differ"
        install = f"install {held.package}=={held.written_for}"
        raise KVPlanError(f"{held.name} {running} {differs}: {held.why}; {against}: {install}")
    if (held, running) not in _warned:
        _warned.add((held, running))
        logger.warning("%s %s: %s, and its members may differ", held.name, running, against)
