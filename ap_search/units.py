"""Units: the only place where human units become SI base units and back."""

from typing import Any, TypeAlias

from numpy.typing import NDArray

Quantity: TypeAlias = "NDArray[Any] | float"
"""A number, or an array of numbers over plans (and, trailing, over stages): every cost kernel takes either."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3

BF16_BYTES = 2
FP32_BYTES = 4


def gib_to_bytes(gib: float) -> int:
    """Bytes in `gib` gibibytes (2^30 bytes each), rounded down."""
    return int(gib * GIB)


def mib_to_bytes(mib: float) -> int:
    """Bytes in `mib` mebibytes (2^20 bytes each), rounded down."""
    return int(mib * MIB)


def gb_to_bytes(gb: float) -> int:
    """Bytes in `gb` gigabytes (10^9 bytes each), rounded down."""
    return int(gb * 1e9)


def bytes_to_gib(size_bytes: float) -> float:
    """Gibibytes (2^30 bytes) in `size_bytes` bytes."""
    return size_bytes / GIB


def bytes_to_mib(size_bytes: float) -> float:
    """Mebibytes (2^20 bytes) in `size_bytes` bytes."""
    return size_bytes / MIB


def gbit_to_bytes_per_s(gbit_per_s: float) -> float:
    """Bytes per second in `gbit_per_s` gigabits (10^9 bits) per second."""
    return gbit_per_s * 1e9 / 8


def gbyte_to_bytes_per_s(gbyte_per_s: float) -> float:
    """Bytes per second in `gbyte_per_s` gigabytes (10^9 bytes) per second."""
    return gbyte_per_s * 1e9


def tb_to_bytes_per_s(tb_per_s: float) -> float:
    """Bytes per second in `tb_per_s` terabytes (10^12 bytes) per second."""
    return tb_per_s * 1e12


def tflops_to_flops_per_s(tflops: float) -> float:
    """Floating-point operations per second in `tflops` TFLOP/s (10^12)."""
    return tflops * 1e12


def us_to_s(microseconds: float) -> float:
    """Seconds in `microseconds`."""
    return microseconds * 1e-6


def ms_to_s(milliseconds: float) -> float:
    """Seconds in `milliseconds`."""
    return milliseconds * 1e-3


def ns_to_s(nanoseconds: float) -> float:
    """Seconds in `nanoseconds`."""
    return nanoseconds * 1e-9


def s_to_ms(seconds: float) -> float:
    """Milliseconds in `seconds`."""
    return seconds * 1e3


def bytes_per_s_to_gbyte(bytes_per_s: float) -> float:
    """Gigabytes (10^9 bytes) per second in `bytes_per_s`."""
    return bytes_per_s / 1e9


def bytes_per_s_to_gbit(bytes_per_s: float) -> float:
    """Gigabits (10^9 bits) per second in `bytes_per_s`."""
    return bytes_per_s * 8 / 1e9


def flops_per_s_to_tflops(flops_per_s: float) -> float:
    """TFLOP/s (10^12 floating-point operations per second) in `flops_per_s`."""
    return flops_per_s / 1e12
