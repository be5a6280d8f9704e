"""What rank 0 makes reaches every rank, and so does its error; what any rank asks for, all do.

Nothing is pickled: a value travels as bytes of its own format, an error as its class name and message. In a single
process the value is handed over as it is.
"""

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from hf_megapack import errors

T = TypeVar("T")

_NOTHING, _VALUE, _ERROR = 0, 1, 2
_PATIENCE = timedelta(days=30)


def is_alone() -> bool:
    """Whether this process is the only one."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def from_rank_zero(
    make: Callable[[], T | None],
    *,
    encode: Callable[[T], bytes],
    decode: Callable[[bytes], T],
    device: torch.device,
    is_slow: bool = False,
) -> T | None:
    """Make a value on rank 0 alone and return it on every rank.

    Args:
        make: Called on rank 0 only; None is a value too.
        encode: The value's bytes.
        decode: The value that the other ranks get from these bytes.
        device: Device that the process group communicates on.
        is_slow: Whether `make` may take longer than the process group waits for a rank (ddp_timeout); the others then
            wait on sockets of their own, until it is done or rank 0 has died.

    Raises:
        MegaPackError: On every rank when `make` raised: on rank 0 whatever it was, elsewhere the same class of
            hf_megapack.errors with the same message, or BackendError for any other class. BackendError also if a
            process is gone.
    """
    if is_alone():
        return make()
    patient = dist.new_group(backend="gloo", timeout=_PATIENCE) if is_slow else None
    if dist.get_rank() == 0:
        try:
            value = make()
            kind, payload = (_NOTHING, b"") if value is None else (_VALUE, encode(value))
        except Exception as error:
            _meet(patient)
            _broadcast(_ERROR, json.dumps([type(error).__name__, str(error)]).encode(), device)
            raise
        _meet(patient)
        _broadcast(kind, payload, device)
        return value
    _meet(patient)
    kind, payload = _broadcast(_NOTHING, b"", device)
    if kind == _ERROR:
        name, message = json.loads(payload)
        known = getattr(errors, name, None)
        if known is None:
            raise errors.BackendError(f"rank 0 failed with {name}: {message}")
        raise known(message)
    return decode(payload) if kind == _VALUE else None


def on_rank_zero(work: Callable[[], None], device: torch.device) -> None:
    """Do something on rank 0 alone, and go on when it is done.

    Args:
        work: Called on rank 0 only.
        device: Device that the process group communicates on.

    Raises:
        MegaPackError: On every rank when `work` raised, as for `from_rank_zero`.
    """
    from_rank_zero(work, encode=lambda _: b"", decode=lambda _: None, device=device)


def all_agree(is_good: bool, device: torch.device) -> bool:
    """Whether something holds on every rank."""
    if is_alone():
        return is_good
    verdict = torch.tensor(int(is_good), device=device)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict.item())


def share_flags(holder: object, prefix: str, device: torch.device) -> bool:
    """Set each flag that is set on any rank on all of them.

    Args:
        holder: Has the flags as attributes, the same on every rank.
        prefix: What their names begin with.
        device: Device that the process group communicates on.

    Returns:
        Whether any flag is set.
    """
    names = sorted(name for name in vars(holder) if name.startswith(prefix))
    values = [bool(getattr(holder, name)) for name in names]
    if not is_alone():
        shared = torch.tensor(values, dtype=torch.int32, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        values = shared.tolist()
    for name, value in zip(names, values, strict=True):
        setattr(holder, name, bool(value))
    return any(values)


def find_differences(values: Mapping[str, str], device: torch.device) -> dict[str, str]:
    """Find what is not the same on every rank. A collective: every rank calls it.

    Args:
        values: Name to text; rank 0's names count.
        device: Device that the process group communicates on.

    Returns:
        Name to rank 0's text, of every value that any rank has otherwise; the same on every rank.
    """
    if is_alone():
        return {}
    first = from_rank_zero(
        lambda: dict(values), encode=lambda value: json.dumps(value).encode(), decode=json.loads, device=device
    )
    differs = torch.tensor([values.get(name) != text for name, text in first.items()], dtype=torch.int32, device=device)
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    return {name: text for (name, text), mark in zip(first.items(), differs.tolist(), strict=True) if mark}


def _meet(group: dist.ProcessGroup | None) -> None:
    """Wait for the other ranks, as long as that group is allowed to, and give it up; nothing without one."""
    if group is not None:
        dist.barrier(group)
        dist.destroy_process_group(group)


def _broadcast(kind: int, payload: bytes, device: torch.device) -> tuple[int, bytes]:
    """Send rank 0's kind and payload to every rank; what the others pass does not matter."""
    try:
        return _send(kind, payload, device)
    except RuntimeError as error:
        raise errors.BackendError(
            f"Rank {dist.get_rank()} lost another process, which failed (its own error says why) or did not take part: "
            f"every process has to call train, evaluate and save_model, not rank 0 alone. {error}"
        ) from error


def _send(kind: int, payload: bytes, device: torch.device) -> tuple[int, bytes]:
    header = torch.tensor([kind, len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(header, 0)
    kind, size = header.tolist()
    if size == 0:
        return kind, b""
    if dist.get_rank() == 0:
        body = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    else:
        body = torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(body, 0)
    return kind, body.cpu().numpy().tobytes()
