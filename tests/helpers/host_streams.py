"""CUDA streams that need no GPU: Dynamo takes them for streams, and they keep a list of what was ordered.

An entry ends in "traced" where Dynamo went through the call instead of leaving it to Python.
"""

import contextlib
from collections.abc import Iterator

import torch


def keep(entry: str) -> None:
    """Append to the list."""
    HostStream.log.append(f"{entry}, traced" if torch.compiler.is_compiling() else entry)


class HostStream(torch.Stream):
    """A stream of the host, which runs nothing by itself."""

    log: list[str]
    current: "HostStream"

    def __new__(cls, *_args, **_kwargs):
        """Take what `torch.cuda.Stream` takes."""
        return super().__new__(cls, device="cpu")

    def __eq__(self, other):
        return self is other

    def __ne__(self, other):
        return self is not other

    __hash__ = torch.Stream.__hash__

    @property
    def name(self) -> str:
        """Main or side."""
        return "main" if self is HostStream.main else "side"

    @property
    def cuda_stream(self) -> int:
        """What takes the place of the driver's handle."""
        return id(self)

    def wait_stream(self, _other) -> None:
        """Keep that this stream waits."""
        keep(f"{self.name} waits")

    def record_event(self, _event=None) -> "HostEvent":
        """Keep that an event was recorded."""
        keep(f"{self.name} records")
        return HostEvent()


class HostEvent:
    """What `HostStream.record_event` returns."""

    def synchronize(self) -> None:
        """Keep that the host waited."""
        keep("host waits")


@contextlib.contextmanager
def host_streams(monkeypatch) -> Iterator[list[str]]:
    """Let code that uses CUDA streams run on the host, and yield the list of what it orders.

    Entering a stream counts only where Python really enters it: code that Dynamo has compiled stays on the stream that
    was current when the graph was called, which is what torch 2.11's code generator does.

    Args:
        monkeypatch: pytest's.
    """

    def enter(self):
        self.before, HostStream.current = HostStream.current, self.stream

    def leave(self, *_exception):
        HostStream.current = self.before

    HostStream.log, HostStream.main = [], HostStream()
    HostStream.current = HostStream.main
    monkeypatch.setattr(torch.cuda.StreamContext, "__enter__", enter)
    monkeypatch.setattr(torch.cuda.StreamContext, "__exit__", leave)
    monkeypatch.setattr(torch.cuda, "Stream", HostStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_device: HostStream.current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_device: None)
    try:
        yield HostStream.log
    finally:
        torch._dynamo.reset()
