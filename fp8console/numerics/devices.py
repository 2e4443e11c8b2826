"""Which FP8 formats a device multiplies in hardware, and how exactly it adds the products up.

Sources: the HIP documentation's page on low-precision types, PyTorch's device checks for scaled products, and NVIDIA's
compute capabilities. A card that is not listed is taken to have none: it is better to emulate than to trust.
"""

from __future__ import annotations

import re

import torch

from fp8console.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, Fp8Format

_OCP = (E4M3FN, E5M2)
_FNUZ = (E4M3FNUZ, E5M2FNUZ)

#: By the first letters of the architecture's name; the longest that fits wins.
_HARDWARE: dict[str, tuple[Fp8Format, ...]] = {
    "gfx94": _FNUZ,  # MI300A, MI300X, MI325X
    "gfx950": _OCP,  # MI350X, MI355X
    "gfx120": _OCP,  # RDNA4
}


def architecture(device: torch.device | str) -> str:
    """The device's architecture: "cpu", an AMD one such as "gfx942", or an NVIDIA one such as "sm_90".

    Raises RuntimeError (torch's own) for a GPU that torch can't reach.
    """
    where = torch.device(device)
    if where.type != "cuda":
        return where.type
    about = torch.cuda.get_device_properties(where)
    amd = str(getattr(about, "gcnArchName", "") or "").split(":")[0]
    return amd if amd.startswith("gfx") else f"sm_{about.major}{about.minor}"


def hardware_formats(arch: str) -> tuple[Fp8Format, ...]:
    """The formats in which this architecture has matrix hardware; () where it has none or is not known."""
    capability = re.fullmatch(r"sm_(\d+)", arch)
    if capability:
        return _OCP if int(capability[1]) >= 89 else ()
    fitting = [prefix for prefix in _HARDWARE if arch.startswith(prefix)]
    return _HARDWARE[max(fitting, key=len)] if fitting else ()


def accumulation_roundoff(arch: str) -> float:
    """Unit roundoff of one addition of products, the u in gamma_k = k u / (1 - k u).

    A CPU adds in float32 to nearest: 2^-24. AMD's matrix units add in float32 and may cut off: 2^-23. NVIDIA's tensor
    cores align the products of an instruction to the largest and keep 13 bits behind it (measured on Hopper;
    DeepSeek-V3's report, section 3.3.2): 2^-13.
    """
    if arch.startswith("sm_"):
        return 2.0**-13
    return 2.0**-23 if arch.startswith("gfx") else 2.0**-24


def partner(fmt: Fp8Format) -> Fp8Format:
    """The format of the other operand: products pair E4M3, or E5M2 gradients, with E4M3 of the same family."""
    return E4M3FNUZ if fmt in _FNUZ else E4M3FN
