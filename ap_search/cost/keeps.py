"""What a trainer's operators keep for backward beyond, or instead of, what fused bf16 kernels keep."""

from dataclasses import dataclass

from ap_search.spec.job import Precision
from ap_search.spec.software import AttentionKernel, Software


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeps:
    """Switches of activation memory; the defaults are those of fused bf16 kernels without dropout.

    `fp8_inputs`: linear layers keep their input in fp8. `per_operator`: selective recomputation keeps single
    operators' outputs instead of dropping single modules.
    """

    fused_activation: bool = True
    fused_attention: bool = True
    dropout: bool = False
    fp8_inputs: bool = False
    scores_in_experts: bool = True
    per_operator: bool = False


def keeps_of(software: Software, precision: Precision) -> Keeps:
    """Read what a software profile keeps in one precision.

    Parameters
    ----------
    software : Software
        The profile.
    precision : Precision
        Number format of the GEMMs.

    Returns
    -------
    Keeps

    Source: docs/guides/software-profiles.md; each profile cites its own.
    """
    return Keeps(
        fused_activation=software.fused_activation,
        fused_attention=software.attention_kernel is not AttentionKernel.UNFUSED,
        dropout=software.dropout,
        fp8_inputs=software.fp8_saved_inputs and precision is not Precision.BF16,
        scores_in_experts=software.scores_in_experts,
        per_operator=software.selective_per_operator,
    )
