"""A digest of many tensors at about the speed of reading them once, on whatever device they are.

Each tensor's bytes are read as 64-bit integers in rows of ``COLUMNS`` (a prime, so that no natural shape lines up with
it) and summed by column modulo 2^64; from tensor to tensor the sums are multiplied by an odd constant and added, which
loses nothing modulo 2^64 and keeps the order; the result, with shapes and dtypes, goes through SHA-256. Any one changed
element changes its column; only several changes that cancel within one column go unseen. It tells a wrong restore from
a right one; it is no defence against somebody who wants to deceive it (checkpoints have SHA-256 of their files).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

COLUMNS = 4093
#: Odd, so that multiplying by it can be undone modulo 2^64: the fractional part of the golden ratio, in 63 bits.
_MIX = 0x4F1BBCDCBFA53E0B
#: Tensors below this many bytes are joined before they are summed: one operation for all of them.
SMALL = 1 << 15


def digest(tensors: Iterable[torch.Tensor], plain: Any = None) -> str:
    """64 hex digits over the tensors' values, shapes, dtypes and order, and over ``plain`` data (see ``canonical``)."""
    hasher = hashlib.sha256()
    totals: dict[torch.device, torch.Tensor] = {}
    small: dict[torch.device, list[torch.Tensor]] = {}

    def mix(data: torch.Tensor) -> None:
        sums = _sums(data)
        before = totals.get(data.device)
        totals[data.device] = sums if before is None else before.mul_(_MIX).add_(sums)

    for tensor in tensors:
        hasher.update(f"{tensor.dtype}{tuple(tensor.shape)};".encode())
        data = _bytes(tensor)
        if 0 < data.numel() < SMALL:
            small.setdefault(data.device, []).append(data)
        elif data.numel():
            mix(data)
    for parts in small.values():
        mix(torch.cat(parts))
    for total in totals.values():
        hasher.update(repr(total.tolist()).encode())
    hasher.update(canonical(plain).encode())
    return hasher.hexdigest()


def canonical(value: Any) -> str:
    """A text that is equal for equal plain data; objects of other types count by their type only."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{canonical(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(canonical(item) for item in value) + "]"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    return f"<{type(value).__name__}>"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.contiguous().reshape(-1).view(torch.uint8)


def _sums(data: torch.Tensor) -> torch.Tensor:
    whole = data.numel() // 8 * 8
    words = _as_words(data[:whole])
    rows = words.numel() // COLUMNS
    total = words.new_zeros(COLUMNS)
    if rows:
        total += words[: rows * COLUMNS].view(rows, COLUMNS).sum(0)
    rest = words[rows * COLUMNS :]
    total[: rest.numel()] += rest
    tail = data[whole:].to(torch.int64)
    total[: tail.numel()] += tail * 0x9E3779B1  # keeps the last bytes apart from whole words
    return total


def _as_words(data: torch.Tensor) -> torch.Tensor:
    if data.numel() == 0:
        return data.new_zeros(0, dtype=torch.int64)
    if data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)
