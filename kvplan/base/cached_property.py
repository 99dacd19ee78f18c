"""An attribute that is computed at its first use, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801  # the name of functools' decorator, which it replaces
    """Compute an attribute once for each object, and keep it in the object's ``__dict__``.

    ``functools.cached_property`` of Python 3.11 holds one lock for each attribute of a class while it computes. A fork
    during that time leaves the lock held in the child, where no thread releases it. From Python 3.12 on it has no lock.
    This class never has a lock: two threads that read it at once may both compute, and get the first result.

    Args:
        func: method that computes the value; its result must not depend on the time of the call.

    Attributes:
        func: the method.
        attrname: name of the attribute.

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

    def __init__(self, func: Callable[[Any], Value]) -> None:
        self.func = func
        self.attrname = getattr(func, "__name__", "")
        # doctest and documentation tools read these.
        self.__doc__ = func.__doc__
        self.__module__ = func.__module__
        self.__wrapped__ = func

    def __set_name__(self, owner: type, name: str) -> None:
        self.attrname = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Value: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> Self | Value:
        if instance is None:
            return self
        # From now on Python finds the value in __dict__ first, because this descriptor has no __set__.
        kept: Value = instance.__dict__.setdefault(self.attrname, self.func(instance))
        return kept
