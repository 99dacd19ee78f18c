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

    def judged(self, running: str) -> tuple[str, str]:
        """Return a verdict on a version, and why: "held", "unknown" or "refused".

        >>> vllm = Held("vLLM", "vllm", ("0.33.0",), 2)
        >>> vllm.judged("0.33.1+cu128"), vllm.judged("0.34.0rc1")[0]
        (('held', ''), 'unknown')
        >>> Held("x", "x", ("5.23.0",), 2, "5.18", "no such class").judged("5.17.0")[0]
        'refused'
        """
        number = release(running)
        known = [(release(each) or ())[: self.parts] for each in self.versions]
        if number is not None and number[: self.parts] in known:
            return "held", ""
        against = f"kvplan's adapter was held against {self.name} {', '.join(self.versions)}"
        old = number is not None and self.least is not None and number < (release(self.least) or ())
        if self.only or old:
            differs = "differs" if old else "may differ"
            install = f"install {self.package}=={self.written_for}"
            return "refused", f"{self.name} {running} {differs}: {self.why}; {against}: {install}"
        return "unknown", f"{self.name} {running}: {against}, and its members may differ"


VLLM = Held("vLLM", "vllm", ("0.33.0",), 2, why="its scheduler is used from inside", only=True)
SGLANG = Held("SGLang", "sglang", ("0.5.23",), 3)
LMCACHE = Held("LMCache", "lmcache", ("0.5.6",), 3)
TRANSFORMERS = Held(
    "transformers", "transformers", ("5.21.0", "5.22.0", "5.23.0"), 2, "5.18.0",
    "its continuous batching offloads by other members",
)  # fmt: skip
NIXL = Held("NIXL", "nixl", ("1.5.1",), 2)
ENGINES = (VLLM, SGLANG, LMCACHE, TRANSFORMERS, NIXL)

_warned: set[str] = set()


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
    """
    try:
        running = running or version(held.package)
    except PackageNotFoundError:
        return
    verdict, why = held.judged(running)
    if verdict == "refused":
        raise KVPlanError(why)
    if verdict == "unknown" and why not in _warned:
        _warned.add(why)
        logger.warning("%s", why)
