"""Time of a layer's mixer: attention (GQA, MLA) or a linear mixer, its norm and residual, TP and CP communication."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.attention_core import CoreTime, core_time
from ap_search.cost.collective import collective_time_s, point_to_point_time_s
from ap_search.cost.context import CostContext, exposed_s
from ap_search.cost.linear import Gemm, LinearTime, linear_time
from ap_search.cost.parts import BlockTime, Part, Wire
from ap_search.cost.shapes import Shapes
from ap_search.plan.plan import Recompute
from ap_search.spec.blocks import Attention, AttentionKind, LinearMixer
from ap_search.spec.machine import Collective
from ap_search.units import BF16_BYTES, Quantity

FloatArray = NDArray[np.float64]
NORM_FORWARD_ELEMENTS = 5
NORM_BACKWARD_ELEMENTS = 6


def projections(attention: Attention, hidden: int, shapes: Shapes) -> tuple[tuple[Gemm, ...], tuple[Gemm, ...]]:
    """GEMM shapes of one attention layer on one rank: those that `mla_up_proj` repeats, and the others.

    Parameters
    ----------
    attention : Attention
        Heads, widths, MLA ranks.
    hidden : int
        Hidden size, elements.
    shapes : Shapes
        Tokens and tensor-parallel degree.

    Returns
    -------
    tuple of tuple of Gemm
        MLA: (query and key-value up-projections), (output, gate, down-projections on local tokens); GQA: (), (output,
        fused QKV and gate), or where queries are of low rank (), (output, query down- and up-projection, the rest).

    Notes
    -----
    A1. MLA down-projections run on each rank's own tokens (duplicated weights, sequence parallelism).

    Source: Megatron-LM `attention.py`, `multi_latent_attention.py`.
    """
    tokens, tp, local = shapes.tokens, shapes.tp, shapes.local_tokens
    values, rank = attention.num_heads * attention.v_head_dim, attention.q_lora_rank
    queries = Gemm(m=tokens, n=attention.num_heads * attention.qk_head_dim / tp, k=rank or hidden)
    other = [Gemm(m=tokens, n=hidden, k=values / tp)]
    if rank:
        other.append(Gemm(m=local, n=rank, k=hidden))
    gate = values if attention.output_gate else 0
    if attention.kind is AttentionKind.GQA:
        columns = (attention.key_value_width + gate) / tp
        if rank:
            return (), (*other, queries, Gemm(m=tokens, n=columns, k=hidden))
        return (), (*other, replace(queries, n=queries.n + columns))
    if gate:
        other.append(Gemm(m=tokens, n=gate / tp, k=hidden))
    other.append(Gemm(m=local, n=attention.kv_lora_rank + attention.qk_rope_head_dim, k=hidden))
    width = attention.num_heads * (attention.qk_head_dim - attention.qk_rope_head_dim) + values
    return (queries, Gemm(m=tokens, n=width / tp, k=attention.kv_lora_rank)), tuple(other)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorComm:
    """Seconds and sent bytes of the tensor-parallel communication around one block."""

    forward_s: Quantity
    backward_s: Quantity
    sent_forward_bytes: Quantity
    sent_backward_bytes: Quantity


def tensor_comm(context: CostContext, shapes: Shapes, *, gathered_width: int, scattered_width: int) -> TensorComm:
    """Tensor-parallel communication of one block (column-parallel in, row-parallel out), seconds and bytes.

    Parameters
    ----------
    context : CostContext
        Collective constants.
    shapes : Shapes
        Tokens, tensor-parallel degree and placement, sequence parallelism.
    gathered_width, scattered_width : int
        Elements per token that the block gathers at its input, and that it reduces at its output.

    Returns
    -------
    TensorComm
        With sequence parallelism: all-gather and reduce-scatter forward; backward both, and one more all-gather of the
        input for weight gradients. Without: an all-reduce each way. 0 at tp = 1.

    Notes
    -----
    A1. bf16 activations; ring algorithms.

    Source: Megatron-LM `tensor_parallel/layers.py`, `mappings.py`; Korthikanti et al. 2022, section 4.2.
    """
    place = shapes.tp_place
    tokens = shapes.tokens * BF16_BYTES

    def run(collective: Collective, width: int) -> Quantity:
        return collective_time_s(
            context.machine,
            collective,
            size_bytes=tokens * width,
            ranks=shapes.tp,
            ranks_per_domain=place.members_per_domain,
            domains=place.domains,
        )

    gather, scatter = run(Collective.ALL_GATHER, gathered_width), run(Collective.REDUCE_SCATTER, scattered_width)
    reduce_out, reduce_in = run(Collective.ALL_REDUCE, scattered_width), run(Collective.ALL_REDUCE, gathered_width)
    back = run(Collective.ALL_GATHER, scattered_width) + run(Collective.REDUCE_SCATTER, gathered_width) + gather
    parallel = shapes.sequence_parallel == 1
    away = tokens * (shapes.tp - 1.0) / shapes.tp
    return TensorComm(
        forward_s=np.where(parallel, gather + scatter, reduce_out),
        backward_s=np.where(parallel, back, reduce_in),
        sent_forward_bytes=away * np.where(parallel, gathered_width + scattered_width, 2 * scattered_width),
        sent_backward_bytes=away * np.where(parallel, 2 * gathered_width + scattered_width, 2 * gathered_width),
    )


def norm_time_s(context: CostContext, shapes: Shapes, *, norms: int, backward: bool) -> Quantity:
    """Time of norms with their residual additions on one rank, seconds.

    Parameters
    ----------
    context : CostContext
        Hidden size and memory bandwidth.
    shapes : Shapes
        Local tokens.
    norms : int
        Norms (each with one residual addition).
    backward : bool
        Whether the backward pass is meant.

    Returns
    -------
    Quantity
        5 (forward) or 6 (backward) tensors of local tokens x hidden moved per norm; one fewer each when the software
        fuses norm and addition.

    Source: operators of Megatron-LM `transformer_layer.py`; traffic counted by hand.
    """
    moved = NORM_BACKWARD_ELEMENTS if backward else NORM_FORWARD_ELEMENTS
    moved -= 1 if context.software.fused_norm else 0
    return context.memory_bound_s(norms * moved * BF16_BYTES * shapes.local_tokens * context.model.hidden_size)


def attention_time(context: CostContext, attention: Attention, shapes: Shapes) -> BlockTime:
    """Time of attention with its projections, rotation, TP and CP communication, seconds per micro-batch.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    attention : Attention
        The layer's attention.
    shapes : Shapes
        Tokens, splits, recompute bits.

    Returns
    -------
    BlockTime
        Parts ATTENTION, TP_COMM, CP_COMM, RECOMPUTE.

    Notes
    -----
    A1. CP exchanges keys and values around a ring (3 (cp-1) chunks per layer), beside attention as far as software
        hides it.

    Source: docs/cost-model/compute.md; TransformerEngine `context_parallel.py`.
    """
    up, other = projections(attention, context.model.hidden_size, shapes)
    up_time, other_time = linear_time(context.linear_rates, up), linear_time(context.linear_rates, other)
    core = core_time(context, attention, shapes)
    rotate = _rotation_s(context, attention, shapes)
    linear_forward = up_time.forward_s + other_time.forward_s
    tensor = _attention_tensor_comm(context, attention, shapes)
    ring_forward, ring_backward, ring_bytes, ring_hidden = _ring(context, attention, shapes, core)
    time = BlockTime.empty(len(shapes.tp))
    time.forward[Part.ATTENTION] = linear_forward + core.forward_s + rotate
    time.backward[Part.ATTENTION] = up_time.backward_s + other_time.backward_s + core.backward_s + rotate
    time.weight_grad[:] = up_time.weight_grad_s + other_time.weight_grad_s
    add_tensor_comm(context, time, tensor, compute_s=linear_forward)
    time.forward[Part.CP_COMM], time.backward[Part.CP_COMM] = ring_forward, ring_backward
    time.hidden[Wire.CP] = ring_hidden
    time.sent_forward_bytes[Wire.CP], time.sent_backward_bytes[Wire.CP] = ring_bytes, 2.0 * ring_bytes
    time.backward[Part.RECOMPUTE] = np.where(shapes.recomputes(Recompute.CORE_ATTN), core.forward_s, 0.0) + np.where(
        shapes.recomputes(Recompute.MLA_UP_PROJ), up_time.forward_s, 0.0
    )
    return time


def add_tensor_comm(context: CostContext, time: BlockTime, comm: TensorComm, *, compute_s: Quantity) -> None:
    """Put a block's tensor-parallel communication into its time: exposed seconds, hidden seconds, bytes.

    Parameters
    ----------
    context : CostContext
        Overlap of the software.
    time : BlockTime
        The block, changed in place.
    comm : TensorComm
        Communication alone.
    compute_s : Quantity
        The block's forward compute that may run beside it (twice that backward).
    """
    ratio = context.software.tp_overlap_ratio
    forward = exposed_s(comm.forward_s, compute_s=compute_s, overlap_ratio=ratio)
    backward = exposed_s(comm.backward_s, compute_s=2.0 * compute_s, overlap_ratio=ratio)
    time.forward[Part.TP_COMM] += forward
    time.backward[Part.TP_COMM] += backward
    time.hidden[Wire.TP] += comm.forward_s - forward + comm.backward_s - backward
    time.sent_forward_bytes[Wire.TP] += comm.sent_forward_bytes
    time.sent_backward_bytes[Wire.TP] += comm.sent_backward_bytes


def _rotation_s(context: CostContext, attention: Attention, shapes: Shapes) -> Quantity:
    """Reading and writing queries and keys once, for the rotation of positions and q/k norms."""
    heads = (attention.num_heads + attention.num_kv_heads) / shapes.tp
    return context.memory_bound_s(2 * BF16_BYTES * shapes.tokens * heads * attention.qk_head_dim)


def _attention_tensor_comm(context: CostContext, attention: Attention, shapes: Shapes) -> TensorComm:
    """Gather the block's input (MLA: the latents only), reduce its output."""
    hidden = context.model.hidden_size
    gathered = hidden
    if attention.kind is AttentionKind.MLA:
        gathered = (attention.q_lora_rank or hidden) + attention.kv_lora_rank + attention.qk_rope_head_dim
    return tensor_comm(context, shapes, gathered_width=gathered, scattered_width=hidden)


def _ring(
    context: CostContext, attention: Attention, shapes: Shapes, core: CoreTime
) -> tuple[Quantity, Quantity, Quantity, Quantity]:
    """Ring exchange of keys and values: exposed forward, exposed backward, bytes forward (twice backward), hidden."""
    keys = np.maximum(attention.num_kv_heads / shapes.tp, 1.0)
    if attention.kind is AttentionKind.MLA:
        keys = attention.num_heads / shapes.tp
    chunk = shapes.tokens * BF16_BYTES * keys * (attention.qk_head_dim + attention.v_head_dim)
    crosses = shapes.cp_place.domains > 1
    hop = point_to_point_time_s(context.machine, size_bytes=chunk, crosses_domain=crosses) * (shapes.cp - 1)
    ratio = context.software.cp_overlap_ratio
    forward = exposed_s(hop, compute_s=core.forward_s, overlap_ratio=ratio)
    backward = exposed_s(2.0 * hop, compute_s=core.backward_s, overlap_ratio=ratio)
    return forward, backward, (shapes.cp - 1) * chunk, 3.0 * hop - forward - backward


def linear_mixer_time(context: CostContext, mixer: LinearMixer, shapes: Shapes) -> BlockTime:
    """Time of a state-space or linear-attention mixer, seconds per micro-batch.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    mixer : LinearMixer
        Widths and scan work.
    shapes : Shapes
        Tokens and splits.

    Returns
    -------
    BlockTime
        Projections as GEMMs, the scan as its FLOPs at the attention kernel's plateau efficiency; part ATTENTION.

    Notes
    -----
    A1. No measured scan kernels were available: the plateau efficiency is an assumption.

    Source: counted from the operators; not validated.
    """
    tokens = shapes.tokens
    hidden = context.model.hidden_size
    linear: LinearTime = linear_time(
        context.linear_rates,
        (
            Gemm(m=tokens, n=mixer.in_width / shapes.tp, k=hidden),
            Gemm(m=tokens, n=hidden, k=mixer.out_width / shapes.tp),
        ),
    )
    machine = context.machine
    reached = machine.attention.efficiency_ratio * context.software.attention_efficiency_ratio
    rate = machine.peak_bf16_flops_per_s * reached
    scan = tokens * mixer.scan_flops_per_token / shapes.tp / rate + machine.attention.launch_s
    time = BlockTime.empty(len(shapes.tp))
    time.forward[Part.ATTENTION] = linear.forward_s + scan
    time.backward[Part.ATTENTION] = linear.backward_s + 2.0 * scan
    time.weight_grad[:] = linear.weight_grad_s
    comm = tensor_comm(context, shapes, gathered_width=hidden, scattered_width=hidden)
    add_tensor_comm(context, time, comm, compute_s=linear.forward_s)
    return time
