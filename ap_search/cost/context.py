"""What prices are made from besides the plans: model, machine, software, job."""

from dataclasses import dataclass, replace

import numpy as np

from ap_search.cost.compute import elementwise_time_s
from ap_search.cost.imbalance import MinMaxLoad, RankLoads
from ap_search.cost.linear import Rates
from ap_search.spec.blocks import Model
from ap_search.spec.job import Job, Precision
from ap_search.spec.machine import Machine
from ap_search.spec.software import Software
from ap_search.units import Quantity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostContext:
    """Everything that stays the same over the plans of one search.

    `min_max_load` solves LPLB's linear program, which only that placement needs. `rank_loads` are those of all groups
    of a table that is priced in parts; None where each part works out its own.
    """

    model: Model
    machine: Machine
    software: Software
    job: Job
    min_max_load: MinMaxLoad | None = None
    rank_loads: RankLoads | None = None

    @property
    def linear_rates(self) -> Rates:
        """Rates of linear layers in the job's precision."""
        rates = Rates.of(self.machine, self.job.precision).slowed(self.compute_ratio)
        if self.job.precision is Precision.BF16:
            return rates
        return replace(rates, peak_flops_per_s=rates.peak_flops_per_s * self.software.fused_cast_ratio)

    @property
    def exact_rates(self) -> Rates:
        """Rates of what stays in bf16 whatever the job's precision: router, head."""
        return Rates.of(self.machine, Precision.BF16).slowed(self.compute_ratio)

    @property
    def compute_ratio(self) -> float:
        """Share of single-kernel speed that this software reaches on this device in a training run."""
        return self.machine.sustained_ratio * self.software.compute_efficiency_ratio

    def memory_bound_s(self, size_bytes: Quantity) -> Quantity:
        """Seconds of an operator that moves `size_bytes`."""
        return elementwise_time_s(self.machine, self.software.hbm_efficiency_ratio, size_bytes)


def exposed_s(communication_s: Quantity, *, compute_s: Quantity, overlap_ratio: float) -> Quantity:
    """Seconds of a communication that compute running beside it does not hide.

    Parameters
    ----------
    communication_s, compute_s : Quantity
        Time of the communication alone, and of the compute that may run beside it.
    overlap_ratio : float
        Share of the communication that the software can run beside compute, 0..1.

    Returns
    -------
    Quantity
        `communication - min(ratio * communication, compute)`.

    Notes
    -----
    A1. Hidden communication does not slow the compute beside it.

    Source: a setting of the software profile, docs/guides/software-profiles.md.
    """
    return communication_s - np.minimum(communication_s * overlap_ratio, compute_s)
