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


def bytes_to_gib(size_bytes: float) -> float:
    """Gibibytes (2^30 bytes) in `size_bytes` bytes."""
    return size_bytes / GIB


def gbit_to_bytes_per_s(gbit_per_s: float) -> float:
    """Bytes per second in `gbit_per_s` gigabits (10^9 bits) per second."""
    return gbit_per_s * 1e9 / 8


def gbyte_to_bytes_per_s(gbyte_per_s: float) -> float:
    """Bytes per second in `gbyte_per_s` gigabytes (10^9 bytes) per second."""
    return gbyte_per_s * 1e9


def tflops_to_flops_per_s(tflops: float) -> float:
    """Floating-point operations per second in `tflops` TFLOP/s (10^12)."""
    return tflops * 1e12


def us_to_s(microseconds: float) -> float:
    """Seconds in `microseconds`."""
    return microseconds * 1e-6
