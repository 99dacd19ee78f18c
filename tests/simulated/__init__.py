"""A GPU that is not there, and caches that say they are on it."""

from tests.simulated.device import Device
from tests.simulated.kernel import kernel
from tests.simulated.objects import Event, Stream, Tensor

__all__ = ["Device", "Event", "Stream", "Tensor", "kernel"]
