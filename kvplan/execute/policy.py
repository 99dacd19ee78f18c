"""What a caller may ask of an executor."""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.errors import PathError

PATHS = ("host", "copy_engine", "copy_engine_2d", "kernel", "staged")


@dataclass(frozen=True, slots=True)
class Policy:
    """How transfers are to be executed.

    Attributes:
        path: ``"auto"``, or the name of the one path to use: ``"host"``, ``"copy_engine"``, ``"copy_engine_2d"``,
            ``"kernel"`` or ``"staged"``.
        threads: CPU threads of the host path; by default one a core, at most 8.

    Raises:
        PathError: a path of no such name, or a thread count that is none.

    >>> Policy(path="host", threads=2)
    Policy(path='host', threads=2)
    """

    path: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.path != "auto" and self.path not in PATHS:
            raise PathError(f"path {self.path!r} is none; paths are 'auto', {', '.join(map(repr, PATHS))}")
        threads = self.threads
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise PathError(f"threads is {threads!r}; the host path uses at least one")
