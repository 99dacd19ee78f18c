"""A GPU that is not there, and caches that say they are on it."""

from tests.simulated.device import Device, Event, Stream, Tensor, kernel
from tests.simulated.graph import Graph

__all__ = ["Device", "Event", "Graph", "Stream", "Tensor", "kernel"]
