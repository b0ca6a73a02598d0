"""Time of embedding, head with loss, and the projection of an MTP module; seconds per micro-batch."""

from ap_search.cost.context import CostContext
from ap_search.cost.linear import Gemm, linear_time
from ap_search.cost.mixer import add_tensor_comm, norm_time_s, tensor_comm
from ap_search.cost.parts import BlockTime, Part
from ap_search.cost.shapes import Shapes
from ap_search.cost.state import padded_vocab
from ap_search.units import BF16_BYTES, FP32_BYTES

LOSS_FORWARD_BYTES, LOSS_BACKWARD_BYTES = 12, 8
UNFUSED_LOSS_FORWARD_BYTES, UNFUSED_LOSS_BACKWARD_BYTES = 24, 14


def embedding_time(context: CostContext, shapes: Shapes) -> BlockTime:
    """Time of the embedding look-up and its gradient, seconds per micro-batch.

    Parameters
    ----------
    context : CostContext
        Hidden size, memory bandwidth, collective constants.
    shapes : Shapes
        Tokens and splits.

    Returns
    -------
    BlockTime
        Part OTHER: rows read and written forward; fp32 rows read and added backward. TP_COMM: the vocabulary-parallel
        reduction.

    Source: Megatron-LM `tensor_parallel/layers.py` VocabParallelEmbedding.
    """
    hidden = context.model.hidden_size
    time = BlockTime.empty(len(shapes.tp))
    time.forward[Part.OTHER] = context.memory_bound_s(2 * BF16_BYTES * shapes.tokens * hidden)
    time.backward[Part.OTHER] = context.memory_bound_s((BF16_BYTES + 2 * FP32_BYTES) * shapes.tokens * hidden)
    comm = tensor_comm(context, shapes, gathered_width=0, scattered_width=hidden)
    add_tensor_comm(context, time, comm, compute_s=0.0)
    return time


def head_time(context: CostContext, shapes: Shapes) -> BlockTime:
    """Time of final norm, logits and cross-entropy, seconds per micro-batch.

    Parameters
    ----------
    context : CostContext
        Vocabulary, hidden size, software's cross-entropy.
    shapes : Shapes
        Tokens and splits.

    Returns
    -------
    BlockTime
        Parts HEAD, OTHER (norm), TP_COMM.

    Notes
    -----
    A1. Logits are bf16 GEMMs whatever the job's precision.
    A2. Cross-entropy moves 12 bytes per logit forward and 8 backward when fused, 24 and 14 unfused.

    Source: Megatron-LM `tensor_parallel/cross_entropy.py`; traffic counted by hand.
    """
    model, software = context.model, context.software
    columns = padded_vocab(model.vocab_size, divisor=software.vocab_divisor, tp=shapes.tp) / shapes.tp
    linear = linear_time(context.exact_rates, (Gemm(m=shapes.tokens, n=columns, k=float(model.hidden_size)),))
    logits = shapes.tokens * columns
    fused = software.fused_cross_entropy
    forward_bytes = LOSS_FORWARD_BYTES if fused else UNFUSED_LOSS_FORWARD_BYTES
    backward_bytes = LOSS_BACKWARD_BYTES if fused else UNFUSED_LOSS_BACKWARD_BYTES
    time = BlockTime.empty(len(shapes.tp))
    time.forward[Part.HEAD] = linear.forward_s + context.memory_bound_s(forward_bytes * logits)
    time.backward[Part.HEAD] = linear.backward_s + context.memory_bound_s(backward_bytes * logits)
    time.weight_grad[:] = linear.weight_grad_s
    time.forward[Part.OTHER] = norm_time_s(context, shapes, norms=1, backward=False)
    time.backward[Part.OTHER] = norm_time_s(context, shapes, norms=1, backward=True)
    comm = tensor_comm(context, shapes, gathered_width=model.hidden_size, scattered_width=0)
    add_tensor_comm(context, time, comm, compute_s=0.0)
    return time


def mtp_projection_time(context: CostContext, shapes: Shapes) -> BlockTime:
    """Time of an MTP module beside its layer and its head: two norms and the projection of both inputs, seconds.

    Parameters
    ----------
    context : CostContext
        Hidden size and rates.
    shapes : Shapes
        Tokens and splits.

    Returns
    -------
    BlockTime
        Parts HEAD (projection), OTHER (norms) and TP_COMM (both inputs gathered, the output gathered).

    Source: Megatron-LM `multi_token_prediction.py` (eh_proj 2h -> h, column-parallel).
    """
    hidden = context.model.hidden_size
    gemm = Gemm(m=shapes.tokens, n=hidden / shapes.tp, k=2.0 * hidden)
    linear = linear_time(context.linear_rates, (gemm,))
    time = BlockTime.empty(len(shapes.tp))
    time.forward[Part.HEAD], time.backward[Part.HEAD] = linear.forward_s, linear.backward_s
    time.weight_grad[:] = linear.weight_grad_s
    time.forward[Part.OTHER] = norm_time_s(context, shapes, norms=2, backward=False)
    time.backward[Part.OTHER] = norm_time_s(context, shapes, norms=2, backward=True)
    comm = tensor_comm(context, shapes, gathered_width=2 * hidden, scattered_width=hidden)
    add_tensor_comm(context, time, comm, compute_s=linear.forward_s)
    return time
