"""Cards that owners really have: memory, bandwidth, dense arithmetic by type, power. Pure data.

Figures are dense (no structured sparsity), for tensor cores that multiply the named type and accumulate in 32 bits,
since that is what engines run. Makers often print twice that (with sparsity), and for GeForce cards four times (and a
16-bit accumulator). GeForce Ampere, Ada and Blackwell reach 512 such operations a clock and multiprocessor in 16 bit:
RTX 4090 128 x 512 x 2.52 GHz = 165 T, RTX 3090 82 x 512 x 1.695 GHz = 71 T; their datacenter kin reach 1,024.

Power caps follow what was measured: a server card capped by 30% needs 30% longer for a prefill and decodes as before;
an RTX 3090 (350 W) at 250 W loses 15% of its prefill and 3% of its decoding, at 200 W 40% and 6%, at 100 W nearly all.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import Final, Literal

Precision = Literal["fp16", "fp8", "int8", "fp4"]


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device's own figures, from its maker's data sheet."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops: float
    """Dense, at the precision that the weights are multiplied in (16 bit unless said)."""
    fp8_flops: float | None = None
    """None: the card has no such unit, and engines fall back to 16 bit."""
    int8_ops: float | None = None
    fp4_flops: float | None = None
    tdp_w: float | None = None
    """What the maker allows the whole card to draw."""
    server: bool = False
    """Made for a rack: clocks chosen for efficiency, which decides how it bears a power cap."""
    source: str = ""
    """Where the figures come from."""

    def at(self, precision: Precision) -> DeviceSpec:
        """The card that multiplies in another type. A type that it lacks is computed in 16 bit, at no gain."""
        rates = {"fp16": self.flops, "fp8": self.fp8_flops, "int8": self.int8_ops, "fp4": self.fp4_flops}
        return replace(self, flops=rates[precision] or self.flops)

    def capped(self, fraction: float) -> DeviceSpec:
        """The card held at `fraction` of its power, 0 to 1. Raises ValueError outside."""
        if not 0 < fraction <= 1:
            raise ValueError("a power cap must be above 0 and at most 1")
        prefill, decode = _cap(self.server, fraction)
        return replace(
            self,
            name=self.name if fraction == 1 else f"{self.name} at {fraction:.0%}",
            flops=self.flops * prefill,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * decode,
            tdp_w=None if self.tdp_w is None else self.tdp_w * fraction,
        )


_CURVES: Final[dict[bool, tuple[tuple[float, float, float], ...]]] = {
    # (part of the power, part of the prefill rate that is left, part of the decode rate that is left)
    True: ((0.0, 0.0, 0.0), (0.4, 0.4, 0.7), (0.7, 1 / 1.3, 1.0), (1.0, 1.0, 1.0)),
    False: ((0.0, 0.0, 0.0), (100 / 350, 0.05, 0.1), (200 / 350, 0.6, 0.94), (250 / 350, 0.85, 0.97), (1.0, 1.0, 1.0)),
}
"""Measured points, and straight lines between them. Of the server curve only 70% was measured; below it is a guess."""


def _cap(server: bool, fraction: float) -> tuple[float, float]:
    curve = _CURVES[server]
    for (x0, p0, d0), (x1, p1, d1) in itertools.pairwise(curve):
        if fraction <= x1:
            part = (fraction - x0) / (x1 - x0)
            return p0 + part * (p1 - p0), d0 + part * (d1 - d0)
    return 1.0, 1.0


_GA102: Final = "NVIDIA Ampere GA102 architecture whitepaper v2.1, appendix A"
_ADA: Final = "NVIDIA Ada GPU architecture whitepaper v2.1, appendix A"
_BLACKWELL: Final = "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1, appendix"
_TURING: Final = "NVIDIA Turing GPU architecture whitepaper, appendix A"
_SHEET: Final = "NVIDIA data sheet of the card; figures with sparsity halved"
_CLOCK: Final = "maker's product page (multiprocessors, boost clock, memory), x 512 operations a clock"
_RDNA: Final = "AMD product page, peak half-precision matrix figure"
_CDNA: Final = "AMD Instinct data sheet, dense figures"
_ARC: Final = "Intel product page (XMX engines x clock)"


def _geforce(
    name: str, gigabytes: int, gb_per_s: float, tflops: float, tdp_w: int, *, source: str, fp8: bool, fp4: bool = False
) -> DeviceSpec:
    # GeForce tensor cores: 8 bit floats twice, 8 bit integers four times, 4 bit floats eight times the 16 bit rate.
    return DeviceSpec(
        name=name,
        memory_bytes=gigabytes * 10**9,
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        flops=tflops * 1e12,
        fp8_flops=2 * tflops * 1e12 if fp8 else None,
        int8_ops=4 * tflops * 1e12,
        fp4_flops=8 * tflops * 1e12 if fp4 else None,
        tdp_w=tdp_w,
        source=source,
    )


def _server(
    name: str,
    gigabytes: int,
    gb_per_s: float,
    tflops: float,
    tdp_w: int,
    *,
    source: str = _SHEET,
    fp8: bool = True,
    int8: bool = True,
    fp4: bool = False,
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        memory_bytes=gigabytes * 10**9,
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        flops=tflops * 1e12,
        fp8_flops=2 * tflops * 1e12 if fp8 else None,
        int8_ops=2 * tflops * 1e12 if int8 else None,
        fp4_flops=4 * tflops * 1e12 if fp4 else None,
        tdp_w=tdp_w,
        server=True,
        source=source,
    )


_TABLE: Final = (
    _geforce("RTX 5090", 32, 1792, 209.5, 575, source=_BLACKWELL, fp8=True, fp4=True),
    _geforce("RTX 5080", 16, 960, 112.6, 360, source=_BLACKWELL, fp8=True, fp4=True),
    _geforce("RTX 5070 Ti", 16, 896, 87.9, 300, source=_BLACKWELL, fp8=True, fp4=True),
    _geforce("RTX 5070", 12, 672, 61.7, 250, source=_BLACKWELL, fp8=True, fp4=True),
    _geforce("RTX 5060 Ti 16GB", 16, 448, 47.4, 180, source=_CLOCK, fp8=True, fp4=True),
    _geforce("RTX 4090", 24, 1008, 165.2, 450, source=_ADA, fp8=True),
    _geforce("RTX 4080 SUPER", 16, 736, 104.4, 320, source=_CLOCK, fp8=True),
    _geforce("RTX 4080", 16, 717, 97.5, 320, source=_ADA, fp8=True),
    _geforce("RTX 4070 Ti SUPER", 16, 672, 88.2, 285, source=_CLOCK, fp8=True),
    _geforce("RTX 4070 Ti", 12, 504, 80.2, 285, source=_CLOCK, fp8=True),
    _geforce("RTX 4070 SUPER", 12, 504, 71.0, 220, source=_CLOCK, fp8=True),
    _geforce("RTX 4070", 12, 504, 58.3, 200, source=_CLOCK, fp8=True),
    _geforce("RTX 4060 Ti 16GB", 16, 288, 44.1, 165, source=_CLOCK, fp8=True),
    _geforce("RTX 3090 Ti", 24, 1008, 80.0, 450, source=_CLOCK, fp8=False),
    _geforce("RTX 3090", 24, 936, 71.2, 350, source=_GA102, fp8=False),
    _geforce("RTX 3080 Ti", 12, 912, 68.2, 350, source=_CLOCK, fp8=False),
    _geforce("RTX 3080", 10, 760, 59.5, 320, source=_GA102, fp8=False),
    _geforce("RTX 3070", 8, 448, 40.6, 220, source=_GA102, fp8=False),
    _geforce("RTX 3060", 12, 360, 25.5, 170, source=_CLOCK, fp8=False),
    _geforce("RTX 2080 Ti", 11, 616, 56.9, 260, source=_TURING, fp8=False),
    _server("RTX PRO 6000 Blackwell", 96, 1792, 503.8, 600, source=_BLACKWELL, fp4=True),
    _server("RTX 6000 Ada", 48, 960, 364.2, 300),
    _server("RTX A6000", 48, 768, 154.8, 300, source=_GA102, fp8=False),
    _server("RTX A5000", 24, 768, 111.1, 230, fp8=False),
    _server("L40S", 48, 864, 362.0, 350),
    _server("L40", 48, 864, 181.0, 300),
    _server("L4", 24, 300, 121.0, 72),
    _server("A40", 48, 696, 149.7, 300, fp8=False),
    _server("A10", 24, 600, 125.0, 150, fp8=False),
    _server("A30", 24, 933, 165.0, 165, fp8=False),
    _server("A100-40 PCIe", 40, 1555, 312.0, 250, fp8=False),
    _server("A100-40 SXM", 40, 1555, 312.0, 400, fp8=False),
    _server("A100-80 PCIe", 80, 1935, 312.0, 300, fp8=False),
    _server("A100-80 SXM", 80, 2039, 312.0, 400, fp8=False),
    _server("H100 PCIe", 80, 2000, 756.0, 350),
    _server("H100 NVL", 94, 3938, 835.0, 400),
    _server("H100 SXM", 80, 3350, 989.0, 700),
    _server("H200", 141, 4800, 989.0, 700),
    _server("H200 NVL", 141, 4800, 835.0, 600),
    _server("B200", 180, 8000, 2250.0, 1000, fp4=True),
    _server("V100-32 SXM", 32, 900, 125.0, 300, fp8=False, int8=False),
    _server("T4", 16, 320, 65.0, 70, fp8=False),
    _server("MI300X", 192, 5300, 1307.0, 750, source=_CDNA),
    _server("MI210", 64, 1638, 181.0, 300, source=_CDNA, fp8=False, int8=False),
    DeviceSpec("RX 7900 XTX", 24 * 10**9, 960e9, 122.8e12, None, 122.8e12, None, 355, source=_RDNA),
    DeviceSpec("RX 9070 XT", 16 * 10**9, 640e9, 195e12, 389e12, 389e12, None, 304, source=_RDNA),
    DeviceSpec("Arc A770", 16 * 10**9, 560e9, 137.6e12, None, 275e12, None, 225, source=_ARC),
    DeviceSpec("Arc B580", 12 * 10**9, 456e9, 116.7e12, None, 233e12, None, 190, source=_ARC),
)

DEVICES: Final[dict[str, DeviceSpec]] = {spec.name: spec for spec in _TABLE}
"""By name. A device that is not here is measured instead."""

_NOISE: Final = re.compile(
    r"nvidia|geforce|tesla|quadro|amd|radeon|instinct|intel|graphics|generation|gpu|laptop|\(r\)"
)
_WORD: Final = re.compile(r"[a-z]+|\d+")
_ALIASES: Final[dict[str, str]] = {
    "NVIDIA A100-SXM4-80GB": "A100-80 SXM",
    "NVIDIA A100-SXM4-40GB": "A100-40 SXM",
    "NVIDIA A100 80GB PCIe": "A100-80 PCIe",
    "NVIDIA A100-PCIE-40GB": "A100-40 PCIe",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "Tesla V100-SXM2-32GB": "V100-32 SXM",
}
"""What drivers call some cards that their makers call otherwise."""


def find_device(name: str) -> DeviceSpec | None:
    """The card that a driver or a person calls `name`, or None. Laptop cards are other, slower cards: None."""
    if name in DEVICES:
        return DEVICES[name]
    if name in _ALIASES:
        return DEVICES[_ALIASES[name]]
    if "laptop" in name.lower() or "max-q" in name.lower():
        return None
    wanted = _words(name)
    for known in DEVICES:
        if _words(known) == wanted:
            return DEVICES[known]
    return None


def _words(name: str) -> list[str]:
    words = _WORD.findall(_NOISE.sub(" ", name.lower()))
    # Memory sizes in a driver's name add nothing where only one size exists.
    return [word for index, word in enumerate(words) if not _is_size(words, index)]


def _is_size(words: list[str], index: int) -> bool:
    word = words[index]
    after = words[index + 1] if index + 1 < len(words) else ""
    return word == "gb" or (word.isdigit() and after == "gb")
