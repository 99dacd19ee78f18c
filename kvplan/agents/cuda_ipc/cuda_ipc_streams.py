"""The streams of an owner that order its own work and its visitors' transfers, on one GPU."""

from __future__ import annotations

from contextlib import suppress

from kvplan.base.process import generation
from kvplan.cuda.device import NOT_READY, Device, Uncaptured
from kvplan.errors import KVPlanError, TransferError


class OwnerStreams:
    """Two streams of a GPU, so that each order holds for work of any of the user's streams.

    Attributes:
        device: the GPU.
        published: the stream behind all work that was published.
        visitors: the stream behind visitors' transfers.

    Raises:
        TransferError: the driver cannot make a stream or an event.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.published = self.visitors = self._event = 0
        self._made_in = generation()
        try:
            with device.current(), Uncaptured(device):
                self.published, self.visitors = device.stream(urgent=True), device.stream(urgent=True)
                self._event = device.event()
        except BaseException:
            self.close()
            raise

    def follow(self, stream: int) -> None:
        """Let :attr:`published` wait for a stream of the user."""
        self._order(stream, self.published, stream)

    def precede(self, stream: int) -> None:
        """Let a stream of the user wait for :attr:`visitors`."""
        self._order(self.visitors, stream, stream)

    def _order(self, first: int, second: int, user: int) -> None:
        device = self.device
        with device.current():
            if device.capturing(user):
                raise KVPlanError("the stream is being captured into a CUDA graph; call this outside of the capture")
            device.record(self._event, first)
            device.wait(second, self._event)

    def marks(self) -> list[int]:
        """Return new events behind both streams; :meth:`all_passed` destroys them."""
        device, found = self.device, list[int]()
        with device.current(), Uncaptured(device):
            for stream in (self.published, self.visitors):
                found.append(device.event())
                device.record(found[-1], stream)
        return found

    def all_passed(self, marks: list[int]) -> bool:
        """Return whether events have passed, and destroy those; never block."""
        cu = self.device.driver
        with self.device.current(), Uncaptured(self.device):
            while marks and cu.cuEventQuery(marks[-1]) != NOT_READY:
                cu.cuEventDestroy_v2(marks.pop())
        return not marks

    def close(self) -> None:
        """Wait until both streams are idle, and destroy them. In a child of a fork it does nothing."""
        streams, event = [one for one in (self.published, self.visitors) if one], self._event
        self.published = self.visitors = self._event = 0
        if self._made_in != generation():
            return
        device = self.device
        with device.current(), Uncaptured(device):
            for stream in streams:
                if event:
                    with suppress(TransferError):  # the GPU may have failed
                        device.record(event, stream)
                        device.synchronize(event)
                device.driver.cuStreamDestroy_v2(stream)
            if event:
                device.driver.cuEventDestroy_v2(event)
