"""Reading software profiles: what a trainer keeps, fuses and hides, from a preset or a YAML file."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ap_search.spec.bands import LeftOut, left_out_bands
from ap_search.spec.presets import locate
from ap_search.spec.reader import read_mapping, validate
from ap_search.spec.software import AttentionKernel, Software
from ap_search.units import mib_to_bytes, us_to_s

Bytes = Annotated[int, Field(ge=0, le=16, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
Microseconds = Annotated[float, Field(ge=0, strict=True)]
Switch = Annotated[bool, Field(strict=True)]

_NOT_VALUES = ("name", "description", "recognised_by", "sources", "left_out_errors")
_CONVERTED = (
    "launch_per_layer_us",
    "launch_per_moe_layer_us",
    "host_per_layer_us",
    "host_per_moe_layer_us",
    "host_sync_us",
    "gradient_bucket_mib",
)


class ProfileFile(BaseModel):
    """A software profile, as a user writes it; a key left out has the value of the preset `default`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1, description="What reports call the profile.")
    description: str = Field(default="", description="The trainer and its settings, one sentence.")
    recognised_by: tuple[str, ...] = Field(
        default=(), description="Words in the source of a recorded run that mean this trainer; the longest one decides."
    )
    weight_bytes: Annotated[int, Field(ge=1, le=8, strict=True)] = Field(
        default=2, description="Bytes per parameter of the weights a device keeps (sharded where ZeRO-3 shards them)."
    )
    gradient_bytes: Annotated[int, Field(ge=1, le=8, strict=True)] = Field(
        default=4, description="Bytes per parameter of gradients, in memory and in their reduction."
    )
    master_bytes: Bytes = Field(
        default=4, description="Bytes per parameter of the optimizer's own copy of the weights."
    )
    moment_bytes: Bytes = Field(default=8, description="Bytes per parameter of the optimizer's moments together.")
    router_dtype_bytes: Annotated[int, Field(ge=1, le=8, strict=True)] = Field(
        default=4, description="Bytes per element of router probabilities."
    )
    fused_norm: Switch = Field(default=False, description="Norm and residual addition in one kernel.")
    fused_activation: Switch = Field(default=True, description="Gate, activation and product in one kernel.")
    fused_cross_entropy: Switch = Field(default=True, description="Cross-entropy without extra copies of the logits.")
    vocab_divisor: Annotated[int, Field(ge=1, strict=True)] = Field(
        default=128, description="The vocabulary is padded to a multiple of this times tp."
    )
    attention_kernel: AttentionKernel = Field(
        default=AttentionKernel.BEST,
        description="best: the device's fastest fused kernel; flash2: FlashAttention-2; unfused: products, softmax.",
    )
    launch_per_layer_us: Microseconds = Field(
        default=20.0, description="Gaps between the kernels of a layer's forward (its backward: twice), microseconds."
    )
    launch_per_moe_layer_us: Microseconds = Field(
        default=180.0, description="The same that an MoE layer adds: launches per expert."
    )
    host_per_layer_us: Microseconds = Field(
        default=300.0,
        description="Host time to enqueue a layer's forward (backward: twice); a faster device waits, microseconds.",
    )
    host_per_moe_layer_us: Microseconds = Field(default=2200.0, description="The same that an MoE layer adds.")
    host_fp8_ratio: Annotated[float, Field(ge=1, le=10, strict=True)] = Field(
        default=1.5, description="How much longer the host needs in fp8: casts are kernels of their own."
    )
    host_sync_us: Microseconds = Field(
        default=50.0,
        description="Time that an MoE layer's forward stops while the host reads token counts; none where inputs are "
        "padded to capacity, microseconds.",
    )
    hbm_efficiency_ratio: Annotated[float, Field(gt=0, le=1, strict=True)] = Field(
        default=0.8, description="Share of the memory bandwidth that norms and elementwise kernels reach."
    )
    compute_efficiency_ratio: Annotated[float, Field(gt=0, le=1, strict=True)] = Field(
        default=0.92,
        description="Share of the device's sustained speed that GEMMs reach in this software.",
    )
    fused_cast_ratio: Annotated[float, Field(ge=1, le=2, strict=True)] = Field(
        default=1.2,
        description="Speed of dense fp8 products with fused casts over that with casts of their own.",
    )
    attention_efficiency_ratio: Annotated[float, Field(gt=0, le=1, strict=True)] = Field(
        default=0.85, description="Share of the fitted kernels' speed that fused attention of this software reaches."
    )
    gradient_bucket_mib: Annotated[float, Field(ge=0, strict=True)] = Field(
        default=0.0, description="Gradients are reduced in buckets of this size, MiB; 0: all at once."
    )
    dp_reduce_overlap_ratio: Share = Field(default=0.9, description="Gradient reduction beside the last backward.")
    dp_gather_overlap_ratio: Share = Field(default=0.9, description="Weight gathering beside the first forward.")
    fsdp_overlap_ratio: Share = Field(default=0.9, description="ZeRO-3 gathers and reductions beside other layers.")
    tp_overlap_ratio: Share = Field(default=0.35, description="Tensor-parallel collectives beside their GEMMs.")
    cp_overlap_ratio: Share = Field(default=0.9, description="The ring of context parallelism beside attention.")
    pp_overlap_ratio: Share = Field(
        default=0.9, description="Stage-to-stage messages of the interleaved schedule; other schedules expose them."
    )
    ep_overlap_ratio: Share = Field(
        default=0.0, description="Dispatch and combine beside other micro-batches' compute."
    )
    shared_expert_overlap: Switch = Field(default=False, description="Shared experts run beside dispatch and combine.")
    fp8_dispatch: Switch = Field(default=False, description="DeepEP sends tokens to experts in fp8 with scales.")
    gradient_copy_bytes: Bytes = Field(
        default=0, description="Bytes per parameter of 16-bit gradients beside the main ones, where those are whole."
    )
    logit_bytes: Annotated[int, Field(ge=2, le=24, strict=True)] = Field(
        default=6, description="Bytes alive per logit when the loss is taken: 2 of logits, 4 per fp32 copy."
    )
    loss_chunks: Annotated[int, Field(ge=1, le=1024, strict=True)] = Field(
        default=1, description="Pieces of the sequence whose logits are taken one after the other, head included."
    )
    dropout: Switch = Field(default=False, description="Dropout after both blocks of a layer, and on unfused scores.")
    fp8_saved_inputs: Switch = Field(default=True, description="Linear layers in fp8 keep their input in fp8.")
    scores_in_experts: Switch = Field(
        default=True,
        description="Router scores are applied inside the experts' activation; else to a copy of what goes in or out.",
    )
    keeps_stage_outputs: Switch = Field(
        default=False, description="A pipeline stage keeps its output until the micro-batch's backward."
    )
    selective_per_operator: Switch = Field(
        default=False,
        description="Selective recomputation keeps attention's output and every second matrix product, nothing else.",
    )
    reshards_under_pp: Switch = Field(
        default=True, description="With pipeline stages, ZeRO-3 frees gathered weights after use."
    )
    fills_stages: Switch = Field(
        default=False,
        description="Pipeline stages are filled in order by parameters, head counted; `validate` uses it for runs that "
        "state no layout.",
    )
    fragmentation_ratio: Share = Field(
        default=0.038,
        description="Share of what is allocated that the allocator keeps besides; used where reserved memory or what "
        "nvidia-smi shows is compared.",
    )
    offloaded_layers: Annotated[int, Field(ge=0, strict=True)] = Field(
        default=0, description="Layers whose saved activations wait in host memory (without pipeline stages)."
    )
    sources: dict[str, str] = Field(default_factory=dict, description="Key of this file -> where its value is from.")
    left_out_errors: LeftOut = {}

    @model_validator(mode="after")
    def _check(self) -> "ProfileFile":
        for key in self.sources:
            if key not in self.model_fields_set:
                raise ValueError(f"sources names {key}, which this file does not give")
        return self


def load_software(source: str | Path) -> Software:
    """Read a software profile: a preset's name, or the path of a YAML or JSON file.

    Parameters
    ----------
    source : str or Path
        `default`, or `my-trainer.yaml`.

    Returns
    -------
    Software
        Times in seconds; `sources` has one line per key, `key: origin`.

    Raises
    ------
    SpecError
        When the source is neither a preset nor a file, or the file has faults (all are named at once).
    """
    path = locate("software", source)
    return software_of(validate(ProfileFile, read_mapping(path), path.name), path.name)


def software_of(file: ProfileFile, where: str) -> Software:
    """Convert a checked profile to seconds and bytes; `where` is the origin of values that name no other."""
    same = file.model_dump(exclude={"sources", "left_out_errors", *_CONVERTED})
    return Software(
        **same,
        launch_per_layer_s=us_to_s(file.launch_per_layer_us),
        launch_per_moe_layer_s=us_to_s(file.launch_per_moe_layer_us),
        host_per_layer_s=us_to_s(file.host_per_layer_us),
        host_per_moe_layer_s=us_to_s(file.host_per_moe_layer_us),
        host_sync_s=us_to_s(file.host_sync_us),
        gradient_bucket_bytes=mib_to_bytes(file.gradient_bucket_mib),
        sources=_sources(file, where),
        left_out_errors=left_out_bands(file.left_out_errors),
    )


def _sources(file: ProfileFile, where: str) -> tuple[str, ...]:
    """One line per key: what the file cites, the file itself, or that the default holds."""
    keys = (key for key in ProfileFile.model_fields if key not in _NOT_VALUES)
    given = file.model_fields_set
    return tuple(f"{key}: {file.sources.get(key, where) if key in given else 'as in profile default'}" for key in keys)
