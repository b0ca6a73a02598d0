"""Model state: parameters per rank of every block, and their bytes under each sharding."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.plan.plan import Sharding
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import LayerKind, Model, MoeFfn
from ap_search.spec.parameters import layer_params, mtp_extra_params
from ap_search.spec.software import Software
from ap_search.units import BF16_BYTES, Quantity

FloatArray = NDArray[np.float64]
DEFAULT_BUCKET_PARAMS = 40_000_000
BUCKET_PARAMS_PER_RANK = 1_000_000
LIVE_FSDP_UNITS = 2


def padded_vocab(vocab_size: int, *, divisor: int, tp: Quantity) -> Quantity:
    """Rows of the embedding after padding, a count.

    Parameters
    ----------
    vocab_size : int
        Tokens of the vocabulary.
    divisor : int
        `make_vocab_size_divisible_by`, 128 in usual configurations.
    tp : Quantity
        Tensor-parallel degree.

    Returns
    -------
    Quantity
        `vocab_size` rounded up to a multiple of `divisor * tp`.

    Source: Megatron-LM `megatron/core/tokenizers/utils/build_tokenizer.py`.
    """
    multiple = divisor * np.asarray(tp)
    rows: Quantity = -(-vocab_size // multiple) * multiple
    return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockParams:
    """Parameters on one rank of every block kind: arrays of shape (plans, blocks), counts.

    Blocks are the model's layer kinds, then embedding, MTP module and head. Router weights are replicated over the
    dense mesh like norms, but reported apart.
    """

    dense: FloatArray
    router: FloatArray
    expert: FloatArray


def block_params(model: Model, software: Software, table: PlanTable, *, redundant_experts: int = 0) -> BlockParams:
    """Parameters that one rank holds of each block kind, counts per plan.

    Parameters
    ----------
    model : Model
        Layer kinds, embeddings, MTP.
    software : Software
        Its vocabulary divisor is used.
    table : PlanTable
        Plans; tp, ep, etp and pp are used.
    redundant_experts : int
        Copies of experts that each MoE layer holds beside its own, over one expert-parallel group.

    Returns
    -------
    BlockParams
        Matrices split over tp (dense) or ep x etp (routed experts); norms, router and MLA down-projections replicated.

    Notes
    -----
    A1. TransformerEngine's specification: MLA down-projections are duplicated over tp.
    A2. With pp > 1 tied embeddings are a second copy on the last stage, and MTP modules need an embedding copy there.

    Source: Megatron-LM `gpt_layer_specs.py`, `multi_token_prediction.py`; docs/cost-model/memory.md.
    """
    kinds = [_kind_columns(model, kind, table, redundant_experts) for kind in model.kinds]
    vocab = padded_vocab(model.vocab_size, divisor=software.vocab_divisor, tp=table.tp)
    matrix = vocab * model.hidden_size / table.tp
    norm = model.hidden_size * model.norm_params_per_element
    zero = np.zeros(len(table))
    positions = model.learned_positions * model.hidden_size + (norm if model.embedding_norm else 0)
    split = table.pp > 1
    own_head = matrix if not model.tied_embeddings else np.where(split, matrix, 0.0)
    head = own_head + norm + (vocab / table.tp if model.head_bias else 0.0)
    mtp_dense, mtp_router, mtp_expert = _mtp_columns(model, kinds, table)
    copied = np.where(split & (not model.tied_embeddings) & (model.mtp_layers > 0), matrix, 0.0)
    return BlockParams(
        dense=np.stack([*(kind[0] for kind in kinds), matrix + positions, mtp_dense, head + copied], axis=1),
        router=np.stack([*(kind[1] for kind in kinds), zero, mtp_router, zero], axis=1),
        expert=np.stack([*(kind[2] for kind in kinds), zero, mtp_expert, zero], axis=1),
    )


def _kind_columns(
    model: Model, kind: LayerKind, table: PlanTable, redundant: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Dense, router and expert parameters per rank of one layer kind."""
    params = layer_params(model, kind)
    copies = params.expert // kind.ffn.num_experts * redundant if isinstance(kind.ffn, MoeFfn) else 0
    split = params.mixer_sharded + params.ffn_sharded + params.shared_sharded
    whole = params.mixer_replicated + params.norms + params.ffn_replicated + params.shared_replicated + params.latent
    dense = split / table.tp + whole
    router = np.full(len(table), float(params.router))
    return dense, router, (params.expert + copies) / (table.ep * table.etp)


def _mtp_columns(
    model: Model, kinds: list[tuple[FloatArray, FloatArray, FloatArray]], table: PlanTable
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Dense, router and expert parameters per rank of one MTP module: a layer, a projection, three norms."""
    dense, router, expert = kinds[model.mtp_index]
    norms = 3 * model.hidden_size * model.norm_params_per_element
    projection = mtp_extra_params(model) - norms
    return dense + projection / table.tp + norms, router, expert


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardDegrees:
    """Over how many ranks weights, gradients and optimizer state are split, for the dense mesh or the expert mesh."""

    weights: Quantity
    gradients: Quantity
    optimizer: Quantity


def shard_degrees(sharding: Quantity, *, group: Quantity, inner: Quantity) -> ShardDegrees:
    """Split of weights, gradients and optimizer state over a data-parallel group, counts of ranks.

    Parameters
    ----------
    sharding : Quantity
        Sharding codes.
    group : Quantity
        Ranks of the group: dp x cp for dense parameters, edp for experts.
    inner : Quantity
        Ranks inside one replica of HSDP.

    Returns
    -------
    ShardDegrees
        1 where nothing is split; ZeRO-1 splits optimizer state, ZeRO-2 gradients too, ZeRO-3 weights too, HSDP all
        three over `inner`.

    Source: Megatron-LM `docs/user-guide/features/dist_optimizer.md`, `megatron_fsdp.md` (6 + 12/d, 2 + 16/d, 18/d).
    """
    hybrid = sharding == Sharding.HSDP
    full = sharding == Sharding.ZERO3
    degree = np.where(hybrid, inner, group)
    return ShardDegrees(
        weights=np.where(full | hybrid, degree, 1),
        gradients=np.where(full | hybrid | (sharding == Sharding.ZERO2), degree, 1),
        optimizer=np.where(sharding == Sharding.NONE, 1, degree),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParamBytes:
    """Bytes that one device keeps per parameter of its rank: weights, gradients, optimizer state, and their sum."""

    weights: Quantity
    gradients: Quantity
    optimizer: Quantity
    total: Quantity


def param_bytes(software: Software, degrees: ShardDegrees) -> ParamBytes:
    """Bytes of weights, gradients and optimizer state that one device keeps per parameter of its rank.

    Parameters
    ----------
    software : Software
        Bytes per parameter of weights, gradients, fp32 master and moments.
    degrees : ShardDegrees
        From `shard_degrees`.

    Returns
    -------
    ParamBytes
        Each divided by the ranks that split it.

    Notes
    -----
    A1. Shards are even: padding of bucket ends (at most 128 d elements each) is left out.
    A2. A 16-bit copy beside whole fp32 gradients (`gradient_copy_bytes`) lives as long as they do.

    Source: as `shard_degrees`; 18 = 2 + 4 + 12 bytes with bf16 weights, fp32 gradients, fp32 master and Adam moments.
    """
    weights = software.weight_bytes / degrees.weights
    copy = np.where(np.equal(degrees.gradients, 1), software.gradient_copy_bytes, 0)
    gradients = software.gradient_bytes / degrees.gradients + copy
    optimizer = (software.master_bytes + software.moment_bytes) / degrees.optimizer
    return ParamBytes(weights=weights, gradients=gradients, optimizer=optimizer, total=weights + gradients + optimizer)


def bucket_bytes(
    software: Software, *, sharding: Quantity, params: Quantity, largest: Quantity, group: Quantity, pp: Quantity = 1
) -> Quantity:
    """Bytes of unsharded gradients and weights that are alive while they are reduced or gathered, on one device.

    Parameters
    ----------
    software : Software
        Bytes per parameter.
    sharding : Quantity
        Sharding codes.
    params, largest : Quantity
        Parameters of the rank's stage, and of its largest block (one FSDP unit); counts before sharding.
    group : Quantity
        Ranks that the parameters are sharded over.
    pp : Quantity
        Pipeline stages.

    Returns
    -------
    Quantity
        ZeRO-2: one gradient bucket of max(40 M, 1 M x group) parameters; ZeRO-3 and HSDP: two units of weights and
        gradients, or all of the stage where the trainer does not free them under pipeline stages; otherwise 0 (the
        contiguous gradient buffer is the gradient itself). 0 in a group of one.

    Notes
    -----
    A1. Neither is larger than the stage. Units hold weights of at most 16 bits, whatever the shards are kept in.

    Source: Megatron-LM `distributed_data_parallel.py` (bucket size), `megatron_fsdp.md` (double buffer);
    pytorch/torchtitan b5bcd76c `distributed/fsdp.py` (no resharding under pp).
    """
    bucket = np.minimum(np.maximum(DEFAULT_BUCKET_PARAMS, BUCKET_PARAMS_PER_RANK * group), params)
    per_param = min(software.weight_bytes, BF16_BYTES) + software.gradient_bytes
    whole = np.greater(pp, 1) & (not software.reshards_under_pp)
    units = np.where(whole, params, np.minimum(LIVE_FSDP_UNITS * largest, params)) * per_param
    gathered = (sharding == Sharding.ZERO3) | (sharding == Sharding.HSDP)
    size = np.where(gathered, units, np.where(sharding == Sharding.ZERO2, bucket * software.gradient_bytes, 0.0))
    return np.where(group > 1, size, 0.0)
