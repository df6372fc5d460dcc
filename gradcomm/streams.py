"""A device's streams and events, through torch's own device modules (``torch.cuda``, ``torch.cpu``, …).

The CPU's are dummies, so what is written against this runs there too. Nothing here waits for a whole
device, and only ``Event.synchronize``, of one event, makes the host wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

#: An event of any device. It is made recorded, by ``Streams.record``.
Event = Any
#: A stream of any device.
Stream = Any


class Streams:
    """Of ``device``, which has an index if it is not the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cpu = device.type == "cpu"
        self._module: Any = torch.get_device_module(device)

    def new(self) -> Stream:
        """A stream beside those that compute."""
        return self._module.Stream() if self.on_cpu else self._module.Stream(device=self.device)

    def current(self) -> Stream:
        return self._module.current_stream(self.device)

    def record(self, *, timing: bool = False, blocking: bool = False) -> Event:
        """An event behind what the current stream was given so far. ``timing``: its time can be told;
        ``blocking``: a thread that waits for it sleeps."""
        options = {"enable_timing": timing, "blocking": blocking}
        event = self._module.Event() if self.on_cpu else self._module.Event(**options)
        event.record(self.current())
        return event

    def wait(self, event: Event) -> None:
        """What the current stream is given from now on runs after the event."""
        self.current().wait_event(event)

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Makes a stream, and its device, current."""
        with self._module.stream(stream):
            yield

    def hold(self, tensor: Tensor) -> None:
        """The current stream uses ``tensor``, which another stream allocated: its memory shall not be
        given to anyone before what the stream was given up to then is done."""
        if self.on_cpu:
            return
        for dense in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
            dense.record_stream(self.current())

    def future(self) -> torch.futures.Future[Tensor]:
        """Completed under a stream, it makes the streams of those who wait for it wait for that one."""
        return torch.futures.Future() if self.on_cpu else torch.futures.Future(devices=[self.device])
