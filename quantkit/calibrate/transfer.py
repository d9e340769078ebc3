"""Keep hidden states on the host; a few batches at a time travel to the device of a block and back.

The rule is that they never stay on the device, also where they would fit: a block works much longer on a batch than the
batch travels (8B, 4096 tokens: 64 MB, 3 ms each way over PCIe 5, beside 50 ms of float32 arithmetic or more), so
nothing is lost, and the device memory that is needed does not grow with the calibration text. In pinned memory they
travel on a stream of their own, the next batch while the block works on this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quantkit.core.interrupt import raise_if_interrupted

ON_DEVICE = 4  # batches of states on the device at most: at work, arriving, leaving, and the one that is freed last


def offload(state: Tensor, device: torch.device) -> Tensor:
    """Move a batch of states to the host, as it should lie there to travel to ``device``: pinned for a GPU."""
    host = state.cpu()
    return host if device.type == "cpu" or host.is_pinned() else host.pin_memory()


class Shuttle:
    """States (float32 ``[batch, tokens, hidden]`` each, on the host) on their way through one device."""

    def __init__(self, states: Sequence[Tensor], device: torch.device) -> None:
        self.states, self.device = states, device
        aside = device.type == "cuda" and all(state.is_pinned() for state in states)
        self.stream = torch.cuda.Stream(device) if aside else None

    def arriving(self) -> Iterator[Tensor]:
        """Iterate over the states on the device, in order; on a CPU the states themselves."""
        ahead = self._fetch(0)
        for index in range(len(self.states)):
            raise_if_interrupted()
            now = ahead
            if self.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(self.stream)
                now.record_stream(torch.cuda.current_stream(self.device))  # its memory is not used again before
            ahead = self._fetch(index + 1)
            yield now

    def leave(self, index: int, result: Tensor) -> None:
        """Write ``result`` over a state that has arrived. Whole on the host after ``finish``."""
        if self.stream is None:
            self.states[index].copy_(result)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self.states[index].copy_(result, non_blocking=True)
            result.record_stream(self.stream)

    def finish(self) -> None:
        """Wait for what is still leaving."""
        if self.stream is not None:
            self.stream.synchronize()

    def _fetch(self, index: int) -> Tensor:
        if index >= len(self.states):
            return torch.empty(0)
        if self.stream is None:
            return self.states[index].to(self.device)
        with torch.cuda.stream(self.stream):
            return self.states[index].to(self.device, non_blocking=True)
