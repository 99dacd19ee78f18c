"""What one document may make: how many components and tensors, and how much work."""

from __future__ import annotations

from kvplan.base.limits import COMPONENTS, OVERLAP_STEPS, TENSORS, VIEWS
from kvplan.errors import LayoutError


class Budget:
    """What is left of it; all layouts of one document share one.

    >>> Budget().components(1 << 30)
    Traceback (most recent call last):
    ...
    kvplan.errors.LayoutError: over 16,384 (layer, part)s; a layout, or a file of several, has at most so many
    """

    def __init__(self) -> None:
        self._components, self._views, self._tensors, self._steps = COMPONENTS, VIEWS, TENSORS, OVERLAP_STEPS

    def components(self, count: int) -> None:
        """Use some of the (layer, part)s.

        Raises:
            LayoutError: there are no more.
        """
        self._components -= count
        if self._components < 0:
            raise LayoutError(
                f"over {COMPONENTS:,} (layer, part)s; a layout, or a file of several, has at most so many"
            )

    def views(self, count: int) -> None:
        """Use some of the views of a dump: one a (layer, part), or one a head of it where heads are apart.

        Raises:
            LayoutError: there are no more.
        """
        self._views -= count
        if self._views < 0:
            raise LayoutError(f"over {VIEWS:,} addresses of layers, parts and heads; a dump has at most so many")

    def tensors(self, count: int) -> None:
        """Use some of the separate tensors of a spec.

        Raises:
            LayoutError: there are no more.
        """
        self._tensors -= count
        if self._tensors < 0:
            raise LayoutError(
                f"over {TENSORS:,} tensors of their own; a spec, or a file of several, has at most so many"
            )

    def steps(self, count: int) -> None:
        """Use some of the work of the proof that no bytes overlap.

        Raises:
            LayoutError: there is no more.
        """
        self._steps -= count
        if self._steps < 0:
            raise LayoutError(
                "axes interleave in so many ways that whether bytes overlap is not known after "
                f"{OVERLAP_STEPS:,} steps; give strides that nest, each larger than all that it steps over"
            )
