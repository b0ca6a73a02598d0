"""The schema of published runs: one JSON object a row, its words those of many sources; unknown fields are named."""

from collections.abc import Mapping
from typing import Annotated, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(ge=0)]


class _Row(BaseModel):
    """Part of a published row; what it does not know is taken out, and named, before."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MlaRow(_Row):
    """Multi-head latent attention."""

    q_lora_rank: Whole | None = Field(default=None, description="Width of the query latent; none: one projection.")
    kv_lora_rank: Positive = Field(description="Width of the key-value latent.")
    qk_nope_head_dim: Positive = Field(description="Part of a query head without positions.")
    qk_rope_head_dim: Positive = Field(description="Part of a query head with rotary positions.")
    v_head_dim: Positive = Field(description="Width of a value head.")


class ModelRow(_Row):
    """What was trained; absent sizes are unknown."""

    name: str = Field(default="", description="As the source calls it.")
    kind: str = Field(default="", description="`dense`, `moe`, or a kind that these fields do not describe.")
    layers: Positive | None = Field(default=None, description="Decoder layers.")
    hidden: Positive | None = Field(default=None, description="Width of the residual stream.")
    ffn: Positive | None = Field(default=None, description="Inner width of dense feed-forwards.")
    heads: Positive | None = Field(default=None, description="Query heads.")
    kv_heads: Positive | None = Field(default=None, description="Key heads.")
    head_dim: Positive | None = Field(default=None, description="Width of a query head.")
    vocab: Positive | None = Field(default=None, description="Rows of the embedding.")
    num_experts: Whole | None = Field(default=None, description="Routed experts of a layer.")
    top_k: Positive | None = Field(default=None, description="Experts that a token is sent to.")
    moe_ffn: Positive | None = Field(default=None, description="Inner width of a routed expert.")
    shared_experts: Whole | None = Field(default=None, description="Shared experts.")
    shared_ffn: Whole | None = Field(default=None, description="Inner width of all shared experts together.")
    first_dense_layers: Whole | None = Field(default=None, description="Layers at the bottom that stay dense.")
    mla: MlaRow | None = Field(default=None, description="Multi-head latent attention, where the model has it.")
    mtp_layers: Whole | None = Field(default=None, description="Multi-token-prediction modules.")
    gated_mlp: bool | None = Field(default=None, description="Whether feed-forwards have three matrices.")
    tied_embeddings: bool | None = Field(default=None, description="Whether the head is the embedding's transpose.")
    params: Positive | None = Field(default=None, description="Parameters in all.")
    params_label: str = Field(default="", description="The same as a label: 176B.")
    max_seq_embeddings: Positive | None = Field(default=None, description="Rows of a learned position table.")
    mp_mode: str = Field(default="", description="Sharding mode of llm-foundry.")
    arch_source: str = Field(default="", description="Where the sizes are from.")
    notes: str = Field(default="", description="Sliding windows and the like, in words.")


class HardwareRow(_Row):
    """On what it ran."""

    gpu: str = Field(default="", description="Device and form factor.")
    count: Positive | None = Field(default=None, description="Devices of the job.")
    mem_gb: Number | None = Field(default=None, description="Memory of a device.")
    gpus_per_nvlink_domain: Positive | None = Field(default=None, description="Devices of a scale-up domain.")
    interconnect: str = Field(default="", description="Links, in words.")


class ExtraArgsRow(_Row):
    """Arguments of a recipe beside the axes; only these are read."""

    first_stage: Positive | None = Field(
        default=None, alias="decoder-first-pipeline-num-layers", description="Layers of the first stage."
    )
    last_stage: Positive | None = Field(
        default=None, alias="decoder-last-pipeline-num-layers", description="Layers of the last stage."
    )
    attention_backend: str | None = Field(
        default=None, alias="attention-backend", description="Kernel of attention: `unfused` keeps its scores."
    )
    hidden_dropout: Number | None = Field(
        default=None, alias="hidden-dropout", description="Dropout; absent among other arguments it is Megatron's 0.1."
    )


class ParallelRow(_Row):
    """How it was laid out."""

    dp: Positive | None = Field(default=None, description="Replicas of the dense mesh.")
    tp: Positive | None = Field(default=None, description="Tensor parallel.")
    pp: Positive | None = Field(default=None, description="Pipeline stages.")
    vpp: Positive | None = Field(default=None, description="Virtual stages on each.")
    cp: Positive | None = Field(default=None, description="Context parallel.")
    ep: Positive | None = Field(default=None, description="Expert parallel.")
    etp: Positive | None = Field(default=None, description="Tensor parallel inside experts.")
    edp: Positive | None = Field(default=None, description="Replicas of the expert mesh; follows from the others.")
    sequence_parallel: bool | None = Field(default=None, description="Sequence parallelism.")
    zero: int | str | None = Field(default=None, description="Stage of ZeRO, or the words of an FSDP.")
    fsdp: int | str | None = Field(default=None, description="Ranks of an FSDP group, or its name; 0: none.")
    dispatcher: str | None = Field(default=None, description="How tokens reach their experts.")
    pp_schedule: str | None = Field(default=None, description="Order of passes over the pipeline.")
    cp_comm: str | None = Field(default=None, description="How context parallelism communicates.")
    mp_mode: str | None = Field(default=None, description="Mixed-precision mode of llm-foundry.")
    dp_derived: bool | None = Field(default=None, description="Whether dp follows from the others.")
    printed_dp: Positive | None = Field(default=None, description="A dp that the source prints by mistake.")
    extra_args: ExtraArgsRow | None = Field(default=None, description="Arguments beside the axes.")


class OverlapRow(_Row):
    """What ran beside what; absent is unknown, not off."""

    moe_a2a: bool | None = Field(default=None, description="Dispatch and combine beside other micro-batches.")
    tp_comm: bool | None = Field(default=None, description="Tensor-parallel collectives beside their GEMMs.")
    async_tp: bool | None = Field(default=None, description="The same in PyTorch.")
    grad_reduce: bool | None = Field(default=None, description="Gradient reduction beside the backward.")
    param_gather: bool | None = Field(default=None, description="Weight gathering beside the forward.")
    overlap_param_gather: bool | None = Field(default=None, description="The same in other words.")
    p2p_overlap: bool | None = Field(default=None, description="Messages between stages.")
    cuda_graph: bool | str | None = Field(default=None, description="Who captures CUDA graphs, if any.")
    cuda_graph_scope: list[str] | str | None = Field(default=None, description="What the graphs capture.")
    pp_layout: str | None = Field(default=None, description="Megatron's layout string.")
    megatron_fsdp: bool | None = Field(default=None, description="Whether Megatron-FSDP shards.")
    cpu_offloading_num_layers: Whole | None = Field(
        default=None, description="Layers whose saved activations wait in host memory."
    )
    compile: bool | None = Field(default=None, description="torch.compile.")
    deterministic: bool | None = Field(default=None, description="Deterministic kernels.")
    delay_wgrad: bool | None = Field(default=None, description="Weight gradients later.")


class MeasuredRow(_Row):
    """What the source printed."""

    step_time_s: Number | None = Field(default=None, description="Seconds of a step.")
    tokens_per_s_per_gpu: Number | None = Field(default=None, description="Tokens per second and device.")
    samples_per_s_per_gpu: Number | None = Field(default=None, description="Sequences per second and device.")
    tflops_per_gpu: Number | None = Field(default=None, description="TFLOP/s of a device by flops_rule.")
    mfu: Number | None = Field(default=None, description="Share of the peak by flops_rule.")
    hfu: Number | None = Field(default=None, description="Share of the peak, recomputation counted.")
    flops_rule: str = Field(default="", description="What TFLOP/s and MFU count, in words.")
    peak_mem_gb: Number | None = Field(default=None, description="Peak memory in mem_unit.")
    peak_reserved_gb: Number | None = Field(default=None, description="Peak of the allocator's pool.")
    peak_alloc_by_rank_mib: dict[str, float] | None = Field(default=None, description="Peak per rank, MiB.")
    steady_mem_gb: Number | None = Field(default=None, description="Allocated between steps.")
    mem_unit: str = Field(default="", description="GiB, or GB that mean GiB.")
    mem_kind: str = Field(default="", description="What the peak counts, and of which stage, in words.")
    oom: bool = Field(default=False, description="Whether the run ended for want of memory.")
    failed: bool | str = Field(default=False, description="Whether the run ended and nobody says why.")
    samples: Whole | None = Field(default=None, description="Steps that were averaged.")
    gpu_hours_per_trillion_tokens: Number | None = Field(default=None, description="As the report states it.")
    total_gpu_hours: Number | None = Field(default=None, description="As the report states it.")
    total_tokens: Number | None = Field(default=None, description="As the report states it.")


class DerivedRow(_Row):
    """What follows from the source's figures."""

    step_time_s: Number | None = Field(default=None, description="Seconds of a step.")
    tokens_per_s_per_gpu: Number | None = Field(default=None, description="Tokens per second and device.")
    gpu_count_inferred: Positive | None = Field(default=None, description="Devices, inferred.")


class PublishedRun(_Row):
    """One published run."""

    id: str = Field(min_length=1, description="Name of the row.")
    source: str = Field(default="", description="Who printed it.")
    group: str = Field(default="", description="Plans that may be ranked against each other.")
    varies: str = Field(default="", description="What differs inside the group.")
    quality: str = Field(default="", description="A as is, B one stated assumption, C trend only.")
    model: ModelRow = Field(default=ModelRow(), description="What was trained.")
    hardware: HardwareRow = Field(default=HardwareRow(), description="On what.")
    parallel: ParallelRow = Field(default=ParallelRow(), description="How it was laid out.")
    global_batch: Positive | None = Field(default=None, description="Sequences per step.")
    micro_batch: Positive | None = Field(default=None, description="Sequences per micro-batch.")
    seq_len: Positive | None = Field(default=None, description="Tokens per sequence.")
    precision: str = Field(default="", description="Number format of the GEMMs, in words.")
    recompute: str | None = Field(default=None, description="What is recomputed, in words; absent: unknown.")
    overlap: OverlapRow = Field(default=OverlapRow(), description="What ran beside what.")
    routing: str | None = Field(default=None, description="Forced or natural, dropless or not, in words.")
    measured: MeasuredRow = Field(default=MeasuredRow(), description="What was printed.")
    derived: DerivedRow = Field(default=DerivedRow(), description="What follows from it.")
    notes: str = Field(default="", description="What to know before comparing.")


def known_fields(schema: type[BaseModel], data: Mapping[str, object]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Take out what a schema does not know.

    Parameters
    ----------
    schema : type of BaseModel
        The schema, with schemas inside.
    data : mapping
        A row.

    Returns
    -------
    tuple of dict and tuple of str
        The row without unknown fields and without nulls, and one `path=value` per field taken out.
    """
    kept: dict[str, object] = {}
    unread: list[str] = []
    fields = {field.alias or name: field.annotation for name, field in schema.model_fields.items()}
    for key, value in data.items():
        if value is None:
            continue
        if key not in fields:
            unread.append(f"{key}={str(value)[:40]}")
            continue
        inner = _schema_of(fields[key])
        if inner is not None and isinstance(value, Mapping):
            kept[key], below = known_fields(inner, value)
            unread += [f"{key}.{name}" for name in below]
        else:
            kept[key] = value
    return kept, tuple(unread)


def _schema_of(annotation: object) -> type[BaseModel] | None:
    """Find the schema in a field's annotation, None where it holds plain values."""
    options = (annotation, *get_args(annotation))
    plain = (one for one in options if isinstance(one, type) and get_origin(one) is None)
    return next((one for one in plain if issubclass(one, BaseModel)), None)
