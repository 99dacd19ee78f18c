"""An attribute that is computed at its first use, without a lock."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

__all__ = ["cached_property"]

if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property(functools.cached_property):  # the name of functools' decorator
        """Compute an attribute once for each object, and keep it in the object's ``__dict__``.

        ``functools.cached_property`` of Python 3.11 holds a lock while it computes. A fork during that time leaves the
        lock held in the child, where no thread releases it. Here two threads that read it at once may both compute, and
        get the first result; the result must not depend on the time of the call.

        >>> class Cache:
        ...     @cached_property
        ...     def nbytes(self):
        ...         print("computed")
        ...         return 4096
        >>> cache = Cache()
        >>> cache.nbytes + cache.nbytes
        computed
        8192
        """

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            return instance.__dict__.setdefault(self.attrname, self.func(instance))
