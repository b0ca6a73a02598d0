"""The schema of recorded runs in our own form: one run a row, in the words of the command line's flags."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ap_search.spec.run import CudaGraphs, FlopsRule, MemoryKind, MemoryStage

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class _Edge(BaseModel):
    """Part of a run: frozen, no unknown keys, no converted types."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MeasuredFile(_Edge):
    """How fast the run was; the first key that is given counts."""

    step_time_s: Positive | None = Field(default=None, description="Seconds of one training step, the median of many.")
    tokens_per_s_per_device: Positive | None = Field(default=None, description="Tokens per second and device.")
    tflops_per_device: Positive | None = Field(default=None, description="TFLOP/s of a device, counted by flops_rule.")
    mfu_ratio: Positive | None = Field(
        default=None, le=1.0, description="Share of the bf16 peak, counted by flops_rule."
    )
    flops_rule: FlopsRule = Field(
        default=FlopsRule.CAUSAL_HALVED,
        description="What TFLOP/s and MFU count: causal-halved (Megatron-LM since 2025), full-attention, hardware.",
    )
    flops_mtp: bool = Field(default=True, description="Whether TFLOP/s and MFU count MTP modules.")


class MemoryFile(_Edge):
    """One peak of device memory."""

    peak_gib: Annotated[tuple[NotNegative, ...], Field(min_length=1)] = Field(
        description="GiB; a number, or one per pipeline stage, 0 where it is not known."
    )
    kind: MemoryKind = Field(
        default=MemoryKind.ALLOCATED,
        description="allocated: tensors (max allocated); reserved: the allocator's pool; nvidia-smi: the device.",
    )
    stage: MemoryStage = Field(
        default=MemoryStage.MAX, description="Which stage: max over all, first, last, ends (first or last), list."
    )

    @field_validator("peak_gib", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        """Take one number for a list of it."""
        return given if isinstance(given, list | tuple) else [given]

    @model_validator(mode="after")
    def _check(self) -> "MemoryFile":
        if len(self.peak_gib) > 1 and self.stage is not MemoryStage.LIST:
            raise ValueError("peak_gib is a list of stages, so stage must be list")
        if not any(self.peak_gib):
            raise ValueError("peak_gib is 0")
        return self


class OverlapFile(_Edge):
    """Which communication ran beside compute; absent: as the software profile has it."""

    ep: bool | None = Field(default=None, description="Dispatch and combine beside other micro-batches.")
    tp: bool | None = Field(default=None, description="Tensor-parallel collectives beside their GEMMs.")
    dp_reduce: bool | None = Field(default=None, description="Gradient reduction beside the backward pass.")
    dp_gather: bool | None = Field(default=None, description="Weight gathering beside the forward pass.")
    pp: bool | None = Field(default=None, description="Messages between pipeline stages.")


class RunFile(_Edge):
    """One recorded run."""

    id: str = Field(min_length=1, description="Name of the run, unique in its file.")
    source: str = Field(default="", description="Who measured it, and where it is written down.")
    group: str = Field(default="", description="Runs of one group are ranked: one model and machine, several plans.")
    quality: str = Field(default="", description="Your own grade, for --quality: A as is, B one assumption, C trend.")
    notes: str = Field(default="", description="What to know before comparing.")
    model: str | dict[str, Any] = Field(
        description="A preset, a path, a name under `models`, or the content of a model file."
    )
    cluster: str = Field(default="h100-sxm", description="A preset or a path.")
    network_gbit_per_s: Positive | None = Field(default=None, description="Network of one device, not the cluster's.")
    memory_limit_gib: Positive | None = Field(default=None, description="Memory of one device, not the cluster's.")
    devices: Count = Field(description="Devices of the whole job.")
    plan: str = Field(description="The plan as --plan takes it: tp=2,pp=4,ep=8, or a short name.")
    unknown: tuple[Literal["mbs", "vpp", "dispatcher", "recompute"], ...] = Field(
        default=(), description="Keys of the plan that nobody wrote down: the fastest values that fit are taken."
    )
    global_batch: Count = Field(description="Sequences per step.")
    seq_len: Count = Field(description="Tokens per sequence.")
    precision: Literal["bf16", "fp8", "mxfp8"] = Field(default="bf16", description="Number format of the GEMMs.")
    capacity_factor: Positive | None = Field(default=None, description="Capacity of an expert; absent: dropless.")
    load: str = Field(default="balanced", description="Tokens per expert, as --load takes it.")
    software: str = Field(default="", description="A software profile; absent: recognised by the source, or default.")
    overlap: OverlapFile = Field(default=OverlapFile(), description="Which communication ran beside compute.")
    cuda_graphs: CudaGraphs | None = Field(
        default=None, description="What CUDA graphs captured: none, attention, moe, layer (both), full (an iteration)."
    )
    fused_attention: bool | None = Field(
        default=None, description="Whether attention kept no scores for its backward; absent: as the profile says."
    )
    dropout: bool | None = Field(default=None, description="Whether there was dropout; absent: as the profile says.")
    half_gradients: bool | None = Field(
        default=None, description="Whether gradients were kept in fp16 (training in fp16); absent: as the profile says."
    )
    offloaded_layers: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Layers whose saved activations waited in host memory; absent: as the profile says."
    )
    loss_chunks: Count | None = Field(
        default=None, description="Pieces in which the loss was taken; absent: as the profile says."
    )
    measured: MeasuredFile = Field(default=MeasuredFile(), description="How fast it was.")
    memory: tuple[MemoryFile, ...] = Field(
        default=(), description="A peak of device memory, or several; the first stands for the run."
    )
    oom: bool = Field(default=False, description="Whether the run ended for want of memory.")
    failed: bool = Field(default=False, description="Whether it ended and nobody knows why.")
    assumed: tuple[str, ...] = Field(default=(), description="What you assumed, one `field: what` a line.")

    @model_validator(mode="after")
    def _check(self) -> "RunFile":
        if self.unknown and "=" not in self.plan:
            raise ValueError("unknown names keys of a plan that is written axis=value,...")
        if self.oom and self.failed:
            raise ValueError("a run has oom: true or failed: true, not both")
        return self

    @field_validator("memory", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        """Take one peak for a list of it."""
        return [given] if isinstance(given, dict) else given


class RunsFile(_Edge):
    """Many runs with what they share."""

    models: dict[str, dict[str, Any]] = Field(default={}, description="Model files' content by name.")
    defaults: dict[str, Any] = Field(default={}, description="Keys of a run, for every run that does not give them.")
    runs: tuple[dict[str, Any], ...] = Field(min_length=1, description="The runs.")


TEMPLATE = """\
# Recorded runs for `ap-search validate FILE`. One entry a run; lines that begin with # may stay or go.
# Keys under `defaults` hold for every run that does not give them itself.
defaults:
  source: my cluster, my trainer 1.0, June 2026
  model: qwen3-30b-a3b        # a preset (ap-search models), a path, or a name under `models:` of this file
  cluster: h100-sxm           # a preset (ap-search clusters) or a path
  global_batch: 1024          # sequences per step
  seq_len: 4096               # tokens per sequence
  precision: bf16             # bf16 fp8 mxfp8
  # software: megatron-core   # a profile (ap-search software); else recognised by the source
  # group: my-64              # runs that may be ranked against each other
runs:
  - id: my-first-run
    devices: 64
    plan: tp=1,pp=4,ep=8,mbs=1,sharding=zero1,recompute=none,dispatcher=alltoall
    measured:
      step_time_s: 10.0       # or tokens_per_s_per_device, or tflops_per_device, or mfu_ratio with flops_rule
    memory:
      peak_gib: 60.0          # or one number per pipeline stage, with stage: list
      kind: allocated         # allocated reserved nvidia-smi
      stage: max              # max first last ends list
    # overlap: {ep: false, tp: false, dp_reduce: true, dp_gather: true, pp: true}
    # cuda_graphs: none       # none attention moe layer full
    # capacity_factor: 1.0    # absent: dropless
    # load: balanced          # or zipf:1.2, or a histogram file
    # oom: true               # the run ended for want of memory
    # unknown: [recompute]    # keys of the plan that nobody wrote down (mbs vpp dispatcher recompute)
    # notes: what to know before comparing
"""
