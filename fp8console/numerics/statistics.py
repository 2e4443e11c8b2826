"""Statistics of many tensors, packed into one tensor a device, without keeping the tensors and without a wait.

L2, amax, mean and the count of non-finite values are of all elements; the shares that an FP8 format saturates or makes
0 are of an evenly spread sample, whose error is about a point (a share p of n values is known to sqrt(p (1 - p) / n)).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8console.numerics.formats import Fp8Format

#: The columns of a packed tensor. ``l2``: NaN or inf when an element is; on a device also inf above 1.8e19 and 0 below
#: 1e-23, the roots of float32's limits. ``amax``, ``mean``: of the finite elements. ``nonfinite``, ``elements``: how
#: many. ``saturated``: share of the elements that are finite and round beyond the format's maximum. ``underflowed``:
#: share of the finite elements other than 0 that the cast makes 0. ``nonzero``: share of the elements that are finite
#: and not 0. NaN in any column but l2 says that there was nothing to tell it from.
FIELDS = ("l2", "amax", "mean", "nonfinite", "elements", "saturated", "underflowed", "nonzero")

#: Elements of a tensor that are looked at one by one.
SAMPLE = 4096
#: Elements taken at a time: on a CPU what its cache holds (a third faster at 100M parameters than whole tensors), on a
#: device what bounds the memory for copies.
_HOST_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 24
#: Samples on a device that are worked on together: bounds the memory for them to 4 MB.
_BLOCK = 256
_NARROW = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


#: Whether a function transform (vmap, grad) is at work on a tensor: its values are not there to be had.
_is_transformed: Callable[[Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda x: False
)


def measurable(x: Tensor) -> bool:
    """Whether ``x`` has real, dense values here: not sparse, sharded, empty, fake, quantised, complex or integer."""
    # A type with a dispatch of its own (DTensor, torchao's) holds its values elsewhere.
    if torch.nn.parameter.is_lazy(x) or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    if not x.is_floating_point() or x.layout is not torch.strided or x.numel() == 0 or x.is_meta or x.is_nested:
        return False
    # Sharded parameters give their memory back between uses and keep their shape.
    return not _is_transformed(x) and x.untyped_storage().nbytes() > 0


def underflow_edge(fmt: Fp8Format) -> float:
    """The largest magnitude that ``fmt`` makes 0: half of its smallest, for a tie goes to the even neighbour, 0."""
    return fmt.min_subnormal / 2


def saturation_edge(fmt: Fp8Format) -> float:
    """The smallest float32 that rounds beyond the maximum of ``fmt``: half a step up, or just above if ties stay."""
    steps = fmt.max / fmt.spacing_at_max
    edge = (steps + 0.5) * fmt.spacing_at_max
    return edge if steps % 2 else edge + 2.0 ** (math.floor(math.log2(edge)) - 23)


class Statistics:
    """Takes tensors one by one with ``add`` and gives the figures of all with ``pack``. Not for several threads."""

    def __init__(self, at_once: bool = True) -> None:
        """``at_once`` False: treat CPU tensors as a device's, whose values must not be asked for."""
        self._at_once = at_once
        self._devices: dict[torch.device, _Device] = {}

    def __len__(self) -> int:
        return sum(len(device.keys) for device in self._devices.values())

    def add(self, key: Any, x: Tensor, fmt: Fp8Format) -> bool:
        """Measure ``x``, of any shape, against ``fmt``; ``key`` comes back with its row. False when it can't be."""
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            # What a type of the script's own does when it is asked is none of our business.
            with torch._C.DisableTorchFunctionSubclass():
                if not measurable(x):
                    return False
                x = x.detach().as_subclass(Tensor)
        elif not measurable(x):
            return False
        with torch.no_grad():
            x = x.detach()
            if torch.is_autocast_enabled(x.device.type):
                # It would measure copies of another precision.
                with torch.autocast(x.device.type, enabled=False):
                    self._add(key, x, fmt)
            else:
                self._add(key, x, fmt)
        return True

    def _add(self, key: Any, x: Tensor, fmt: Fp8Format) -> None:
        device = self._devices.get(x.device)
        if device is None:
            kind = _Host if self._at_once and x.device.type == "cpu" else _Device
            device = self._devices[x.device] = kind()
        flat, repeats = _flat(x)
        device.add(key, flat, repeats, fmt)

    def pack(self) -> list[tuple[list[Any], Tensor]]:
        """For each device the keys and their figures: float64 (n, len(FIELDS)) on it (float32 where it has none)."""
        with torch.no_grad():
            return [(device.keys, device.pack()) for device in self._devices.values()]


def statistics(tensors: list[Tensor], fmt: Fp8Format) -> Tensor:
    """Figures of ``tensors``, all of one device: (n, len(FIELDS)); a row of NaN for one that is not measurable."""
    made = Statistics()
    for index, tensor in enumerate(tensors):
        made.add(index, tensor, fmt)
    packed = made.pack()
    if not packed:
        return torch.full((len(tensors), len(FIELDS)), math.nan, dtype=torch.float64, device="cpu")
    keys, rows = packed[0]
    result = torch.full((len(tensors), len(FIELDS)), math.nan, dtype=rows.dtype, device=rows.device)
    result[torch.tensor(keys, device=rows.device)] = rows
    return result


class _Device:
    """The figures of one device's tensors while they are gathered; nothing is read from it."""

    piece = _DEVICE_PIECE

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self._whole: list[Tensor] = []  # four 0-d tensors a row: l2, amax, mean, nonfinite
        self._about: list[tuple[float, float, float]] = []  # elements, the format's two edges
        self._samples: list[Tensor] = []
        self._shares: list[Tensor] = []

    def add(self, key: Any, flat: Tensor, repeats: int, fmt: Fp8Format) -> None:
        self._whole += self._figures(flat, repeats)
        self.keys.append(key)
        self._about.append((float(flat.numel() * repeats), underflow_edge(fmt), saturation_edge(fmt)))
        self._take_sample(flat)

    def _figures(self, flat: Tensor, repeats: int) -> list[Tensor]:
        parts = []
        for piece in flat.split(self.piece) if flat.numel() > self.piece else (flat,):
            x = piece.float() if piece.dtype in _NARROW else piece
            wide = x.dtype if x.dtype == torch.float64 else torch.float32
            finite = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            l2 = torch.linalg.vector_norm(x, 2, dtype=wide)
            amax = torch.linalg.vector_norm(finite, math.inf, dtype=wide)
            parts.append((l2, amax, finite.sum(dtype=wide), (x != finite).sum(dtype=torch.float32)))
        if len(parts) == 1:
            l2, amax, total, bad = parts[0]
        else:
            l2, amax, total, bad = (torch.stack(column) for column in zip(*parts))
            l2, amax, total, bad = torch.linalg.vector_norm(l2), amax.max(), total.sum(), bad.sum()
        count = flat.numel() - bad  # 0 divides 0 to NaN, which says what there is to say
        amax = amax.masked_fill(count <= 0, math.nan)
        mean = (total / count).masked_fill(total.isinf(), math.nan)  # a sum beyond float32 tells nothing
        figures = (l2 * math.sqrt(repeats), amax, mean, bad * repeats)
        return [figure.to(_wide(flat.device)) for figure in figures]

    def _take_sample(self, flat: Tensor) -> None:
        # A copy of its own: the block that it goes into may be made on another stream.
        sample = _spread(flat)
        self._samples.append(_float32(sample) if sample.dtype == torch.float64 else sample.to(torch.float32, copy=True))
        if len(self._samples) == _BLOCK:
            self._work_off()

    def _work_off(self) -> None:
        """Shares of the samples that wait: (rows, 3) saturated, underflowed, nonzero."""
        if not self._samples:
            return
        samples, self._samples = self._samples, []
        about = self._about[-len(samples) :]
        device = samples[0].device
        lengths = [len(sample) for sample in samples]
        block = torch.zeros(len(samples), max(lengths), dtype=torch.float32, device=device)
        torch._foreach_copy_([row[:n] for row, n in zip(block, lengths)], samples)
        magnitude = block.abs_().nan_to_num_(nan=math.inf, posinf=math.inf)
        # What is filled up with is 0, so that only the count of zeros has to know of it.
        beside = [[n, max(lengths) - n, *edges[1:]] for n, edges in zip(lengths, about)]
        n, filled, low, high = _sent(beside, device, torch.float32).unbind(1)
        marks = torch.empty_like(magnitude)

        def count(compare: Any, bound: Any) -> Tensor:
            compare(magnitude, bound, out=marks)
            return marks.sum(1)

        zeros, bad = count(torch.eq, 0.0), count(torch.eq, math.inf)
        nonzero = n + filled - zeros - bad
        underflowed = (count(torch.le, low[:, None]) - zeros) / nonzero
        saturated = (count(torch.ge, high[:, None]) - bad) / n
        self._shares.append(torch.stack((saturated, underflowed, nonzero / n), 1))

    def pack(self) -> Tensor:
        self._work_off()
        shares = torch.cat(self._shares)
        whole = torch.stack(self._whole).reshape(-1, 4)
        elements, _, high = _sent(self._about, whole.device, whole.dtype).unbind(1)
        shares = shares.to(whole.dtype)
        # Of the elements beyond the maximum a sample may have caught none, but amax says that there is one.
        saturated = torch.maximum(shares[:, 0], (whole[:, 1] >= high) / elements)
        return torch.cat((whole, elements[:, None], saturated[:, None], shares[:, 1:]), 1)


class _Host(_Device):
    """The CPU's, where asking for a value costs nothing: what is finite throughout needs one pass less and no copy."""

    piece = _HOST_PIECE

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[list[float]] = []
        self._bounds: dict[str, tuple[float, Tensor]] = {}  # of a format: where saturation begins, see _shares_of
        # Memory that is used again: new memory costs several passes.
        self._wide: Tensor | None = None
        self._sample = torch.empty(SAMPLE, dtype=torch.float32, device="cpu")
        self._marks = torch.empty(4 * SAMPLE, dtype=torch.float32, device="cpu")

    def add(self, key: Any, flat: Tensor, repeats: int, fmt: Fp8Format) -> None:
        squares = amax = total = 0.0
        bad = 0
        for piece in flat.split(self.piece) if flat.numel() > self.piece else (flat,):
            x = piece if piece.dtype in (torch.float32, torch.float64) else self._widened(piece)
            # The product goes first: of these passes it is the one that reads memory fastest; the others find the cache
            # filled, where amin and amax together take less time than aminmax.
            square = torch.dot(x, x).item()
            low, high = x.amin().item(), x.amax().item()
            if not math.isfinite(high - low):
                finite = x[x.isfinite()]
                bad += x.numel() - finite.numel()
                x = finite
                low, high = (x.amin().item(), x.amax().item()) if x.numel() else (0.0, 0.0)
            largest = max(high, -low)
            if not 1e-30 < square < 1e36 and largest > 0 and square == square:
                # Squares leave float32 at the roots of its limits.
                wide = piece.double()
                square = torch.dot(wide, wide).item()
            squares += square
            amax = max(amax, largest)
            part = x.sum().item()
            total += part if math.isfinite(part) else x.double().sum().item()
        elements = float(flat.numel() * repeats)
        count = flat.numel() - bad
        l2 = math.sqrt(squares * repeats) if squares == squares else math.nan
        whole = [l2, amax, total / count] if count else [l2, math.nan, math.nan]
        edge, bounds = self._bounds.get(fmt.name) or self._make_bounds(fmt)
        beyond = amax >= edge
        saturated, underflowed, nonzero = self._shares_of(flat, bounds if beyond or bad else bounds[:2])
        if beyond:
            saturated = max(saturated, 1 / elements)  # a sample may have caught none
        self._rows.append([*whole, float(bad * repeats), elements, saturated, underflowed, nonzero])
        self.keys.append(key)

    def _make_bounds(self, fmt: Fp8Format) -> tuple[float, Tensor]:
        edge = saturation_edge(fmt)
        below = edge * (1 - 2.0**-24)  # rounds to the float32 before the edge
        columns = [0.0, underflow_edge(fmt), below, torch.finfo(torch.float32).max]
        made = self._bounds[fmt.name] = edge, torch.tensor(columns, dtype=torch.float32, device="cpu")[:, None]
        return made

    def _shares_of(self, flat: Tensor, bounds: Tensor) -> tuple[float, float, float]:
        """Shares of the sample: saturated, underflowed, nonzero.

        ``bounds``: 0, the most that becomes 0, the most that does not saturate, the most that is finite; the last two
        may be left out where no element is over them.
        """
        chosen = _spread(flat)
        count = chosen.numel()
        sample = self._sample[:count]
        if chosen.dtype is torch.float32:
            torch.abs(chosen, out=sample)
        else:
            sample.copy_(_float32(chosen) if chosen.dtype == torch.float64 else chosen).abs_()
        # Comparing into numbers is several times faster than into bools; a NaN is over no bound.
        rows = bounds.shape[0]
        marks = torch.gt(sample, bounds, out=self._marks[: rows * count].view(rows, count))
        over: list[float] = marks.sum(1).tolist()
        nonzero, kept, beyond, infinite = over if rows == 4 else (*over, 0.0, 0.0)
        nonzero -= infinite
        underflowed = (nonzero - (kept - infinite)) / nonzero if nonzero else math.nan
        return (beyond - infinite) / count, underflowed, nonzero / count

    def _widened(self, piece: Tensor) -> Tensor:
        """``piece`` in float32."""
        if self._wide is None:
            self._wide = torch.empty(self.piece, dtype=torch.float32, device="cpu")
        wide: Tensor = self._wide[: piece.numel()].copy_(piece)
        return wide

    def pack(self) -> Tensor:
        return torch.tensor(self._rows, dtype=torch.float64, device="cpu")


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _sent(rows: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers of the host on ``device``, without waiting for it: from pinned memory where there is such."""
    host = torch.tensor(rows, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _flat(x: Tensor) -> tuple[Tensor, int]:
    """The elements of ``x`` in one dimension, in the order of memory, and how often each of them counts."""
    repeats = 1
    if not x.is_contiguous():
        for dim, (size, stride) in enumerate(zip(x.shape, x.stride())):
            if stride == 0 and size > 1:  # expanded, as the gradient of a mean is
                x = x.narrow(dim, 0, 1)
                repeats *= size
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    return x.reshape(-1), repeats


def _spread(flat: Tensor) -> Tensor:
    """At most SAMPLE elements spread evenly over all of them; a view."""
    count = flat.numel()
    if count <= SAMPLE:
        return flat
    return flat[:: _step(count)]


@functools.lru_cache(maxsize=1024)
def _step(count: int) -> int:
    """The least step that takes at most SAMPLE of ``count`` elements and has no factor in common with their number.

    So it has none with any side of the shape, and goes through all columns and rows alike.
    """
    step = -(-count // SAMPLE)
    while math.gcd(step, count) != 1:
        step += 1
    return step


def _float32(x: Tensor) -> Tensor:
    """Magnitudes of float64 in float32; one that is beyond its range takes the end of it, and is not made inf or 0."""
    magnitude = x.abs()
    limits = torch.finfo(torch.float32)
    within = magnitude.clamp(limits.tiny, limits.max)
    return torch.where(magnitude.isfinite() & (magnitude > 0), within, magnitude).float()
