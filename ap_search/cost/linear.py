"""Chains of dense linear layers: forward, input-gradient and weight-gradient seconds of a list of GEMM shapes."""

from dataclasses import dataclass, replace

import numpy as np

from ap_search.cost.compute import gemm_time_s, gemm_weight_gradient_time_s
from ap_search.spec.job import Precision
from ap_search.spec.machine import GemmFit, Machine
from ap_search.units import Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What linear layers of one precision reach on one machine: fit, peak, memory bandwidth."""

    fit: GemmFit
    peak_flops_per_s: float
    hbm_bytes_per_s: float

    def slowed(self, ratio: float) -> "Rates":
        """Reach only a share of the peak and of the bandwidth."""
        return replace(
            self, peak_flops_per_s=self.peak_flops_per_s * ratio, hbm_bytes_per_s=self.hbm_bytes_per_s * ratio
        )

    @classmethod
    def of(cls, machine: Machine, precision: Precision) -> "Rates":
        """Choose the fit and the peak of a precision (fp8 and mxfp8 share one)."""
        if precision is Precision.BF16:
            return cls(
                fit=machine.gemm,
                peak_flops_per_s=machine.peak_bf16_flops_per_s,
                hbm_bytes_per_s=machine.hbm_bytes_per_s,
            )
        return cls(
            fit=machine.gemm_fp8,
            peak_flops_per_s=machine.peak_fp8_flops_per_s,
            hbm_bytes_per_s=machine.hbm_bytes_per_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gemm:
    """Shape of one forward GEMM on one rank: rows m, columns n, inner width k; elements."""

    m: Quantity
    n: Quantity
    k: Quantity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearTime:
    """Seconds of a chain of GEMMs: forward, input gradients, weight gradients."""

    forward_s: Quantity
    input_grad_s: Quantity
    weight_grad_s: Quantity

    @property
    def backward_s(self) -> Quantity:
        """Both gradients."""
        return self.input_grad_s + self.weight_grad_s


def linear_time(rates: Rates, gemms: tuple[Gemm, ...]) -> LinearTime:
    """Time of GEMMs that run one after the other, with their gradients, seconds.

    Parameters
    ----------
    rates : Rates
        Fit, peak and bandwidth.
    gemms : tuple of Gemm
        Forward shapes.

    Returns
    -------
    LinearTime
        Sums over the chain.

    Notes
    -----
    A1. The input gradient of (m, k) x (k, n) is an (m, n) x (n, k) GEMM at the same efficiency.

    Source: `gemm_time_s`, `gemm_weight_gradient_time_s`.
    """
    forward: Quantity = np.float64(0.0)
    input_grad: Quantity = np.float64(0.0)
    weight_grad: Quantity = np.float64(0.0)
    for gemm in gemms:
        common = {"peak_flops_per_s": rates.peak_flops_per_s, "hbm_bytes_per_s": rates.hbm_bytes_per_s}
        forward = forward + gemm_time_s(rates.fit, m=gemm.m, n=gemm.n, k=gemm.k, **common)
        input_grad = input_grad + gemm_time_s(rates.fit, m=gemm.m, n=gemm.k, k=gemm.n, **common)
        weight_grad = weight_grad + gemm_weight_gradient_time_s(rates.fit, m=gemm.m, n=gemm.n, k=gemm.k, **common)
    return LinearTime(forward_s=forward, input_grad_s=input_grad, weight_grad_s=weight_grad)
