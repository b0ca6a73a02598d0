"""Memory kernels against published formulas and against autograd's saved tensors, to the byte.

Sources: NVIDIA/Megatron-LM d98e8a64 (`theoretical_memory_usage.py` executed, `dist_optimizer.md`,
`build_tokenizer.py`, `distributed_data_parallel.py`, `tensor_parallel/cross_entropy.py`); Korthikanti et al. 2022,
table 2; saved tensors of the same operator graphs in PyTorch on a CPU.
"""

import pytest

from ap_search.cost.activations import attention_saved_bytes, layer_memory, logits_bytes
from ap_search.cost.blocks import block_costs
from ap_search.cost.replicas import replica_groups
from ap_search.cost.shapes import Shapes, block_shapes
from ap_search.cost.state import bucket_bytes, padded_vocab, param_bytes, shard_degrees
from ap_search.plan.plan import Sharding
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import DenseFfn, LayerKind, Model
from tests.cost_cases import PLAIN, context, deepseek_v3, gqa, mixtral_8x7b, plan, price

TOKENS = 4096
ROUTER_BYTES = TOKENS * 8 * 8
"""Mixtral's fp32 logits and scores: 8 experts x 2 x 4 bytes per token."""


def shapes_of(which: Model, text: str) -> Shapes:
    where = context(which, 8, global_batch=8)
    return block_shapes(where.machine, where.job, PlanTable.from_plans([plan(where, text)]))


@pytest.mark.parametrize(("ranks", "per_param"), [(1, 18.0), (8, 7.5), (64, 6.1875)])
def test_distributed_optimizer_keeps_6_plus_12_over_d_bytes(ranks: int, per_param: float) -> None:
    """2 bf16 weight + 4 fp32 gradient + (4 master + 8 moments)/d."""
    assert param_bytes(PLAIN, shard_degrees(Sharding.ZERO1, group=ranks, inner=ranks)).total == per_param


def test_first_stage_of_mixtral_on_64_devices() -> None:
    """tp2 pp4 ep8 etp1 gives dp8 and edp2; stage 0 holds the embedding and 8 layers.

    Dense: 8 x (41,943,040/2 attention + 2 x 4,096 norms + 4,096 x 8 router) + 32,000 x 4,096/2 embedding = 233,635,840.
    Experts: 8 layers x 8/8 experts x 3 x 4,096 x 14,336 = 1,409,286,144.
    Bytes: 233,635,840 x (6 + 12/8) + 1,409,286,144 x (6 + 12/2) = 18,663,702,528.
    Megatron's estimator says 18,663,710,208: it spreads the final norm over the stages (4,096/4 params x 7.5 = 7,680).
    """
    where = context(mixtral_8x7b(), 64)
    stage = price(where, "tp=2,pp=4,ep=8").memory.stages[0]
    dense_bytes = 233_635_840 * 7.5
    assert stage.shared.total_bytes + stage.router_bytes == dense_bytes
    assert stage.expert.weights_bytes == 1_409_286_144 * 2
    total = stage.shared.total_bytes + stage.router_bytes + stage.expert.total_bytes
    assert total == 18_663_702_528
    assert total + 4096 // 4 * 7.5 == 18_663_710_208


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"),
    [
        (50_257, 1, 50_304),
        (50_257, 2, 50_432),
        (32_000, 8, 32_768),
        (128_256, 8, 129_024),
        (129_280, 8, 130_048),
        (151_936, 8, 152_576),
    ],
)
def test_vocabulary_is_padded_to_128_times_tp(vocab: int, tp: int, rows: int) -> None:
    assert padded_vocab(vocab, divisor=128, tp=tp) == rows


def test_default_gradient_bucket_at_64_ranks_is_64_million_params() -> None:
    """max(40 M, 1 M x 64) parameters of 4 bytes, where the stage has as many."""
    size = bucket_bytes(PLAIN, sharding=Sharding.ZERO2, params=1e9, largest=1e8, group=64)
    assert size == 64_000_000 * 4


def test_dense_gelu_layer_saves_34_sbh_less_its_dropout_masks() -> None:
    """s = h = 4096, b = 1, 32 heads of 128: Korthikanti's 34 s b h = 570,425,344 with selective recompute.

    Two dropout masks of one byte per element of h are 2 s b h of that; our graph has none. Fused attention saves a
    log-sum-exp of 4 x 32 bytes per token, each of two norms 4: 136 bytes that the paper leaves out.
    """
    kind = LayerKind(mixer=gqa(32, 32), ffn=DenseFfn(width=4 * 4096, gated=False))
    which = Model(name="gpt", hidden_size=4096, vocab_size=1024, tied_embeddings=False, kinds=(kind,), layers=(0,) * 8)
    saved = layer_memory(kind=kind, hidden=4096, shapes=shapes_of(which, "tp=1"), shape=None).saved
    masks, statistics = 2 * TOKENS * 4096, TOKENS * (4 * 32 + 2 * 4)
    assert saved + masks - statistics == 570_425_344
    assert saved == 537_427_968


def test_mixtral_attention_saves_what_autograd_saves() -> None:
    """Per token 4 x 4096 + 2 (32 + 2 x 8) 128 + 2 x 32 x 128 + 4 x 32 + 4 = 36,996 bytes; x 4096 = 151,535,616."""
    which = mixtral_8x7b()
    mixer = which.attention
    assert mixer is not None
    assert attention_saved_bytes(mixer, 4096, shapes_of(which, "tp=1")) == 151_535_616


def test_mixtral_experts_save_what_autograd_saves() -> None:
    """Norm input and output 4 x 4096 + 4 per token, and per copy 2 x 4096 + 6 x 14336 + 4: 838,909,952 bytes.

    Beside that core we count the router's logits and scores.
    """
    which = mixtral_8x7b()
    where = context(which, 8, global_batch=8)
    costs = block_costs(where, PlanTable.from_plans([plan(where, "tp=1")]), (0,))
    assert costs.memories[0].saved - 151_535_616 - ROUTER_BYTES == 838_909_952


def test_moe_act_recompute_frees_the_activation_output() -> None:
    """2 x 14336 bytes per copy, 8,192 copies: 234,881,024 bytes."""
    which = mixtral_8x7b()
    where = context(which, 8, global_batch=8)
    plans = [plan(where, "tp=1"), plan(where, "tp=1,recompute=selective:moe_act")]
    memory = block_costs(where, PlanTable.from_plans(plans), (0,)).memories[0]
    assert memory.saved[0] - memory.saved[1] == 234_881_024
    assert memory.recomputed[1] - memory.recomputed[0] == 234_881_024


def test_deepseek_v3_routed_core_saves_what_autograd_saves() -> None:
    """x and norm output 4 x 7168 per token, 8 copies of 2 x 7168 + 6 x 2048: 989,855,744 bytes.

    Beside that core: 4 bytes of norm statistic per token and of probability per copy, 8 x 256 of logits and scores, and
    6 x 2048 of the shared expert.
    """
    which = deepseek_v3()
    where = context(which, 8, global_batch=8)
    memory = block_costs(where, PlanTable.from_plans([plan(where, "tp=1")]), (-1, 0)).memories[1]
    mixer = which.attention
    assert mixer is not None
    attention = attention_saved_bytes(mixer, 7168, shapes_of(which, "tp=1"))
    beside = TOKENS * (4 + 8 * 4 + 8 * 256 + 6 * 2048)
    assert memory.saved - attention - beside == 989_855_744


def test_logits_and_softmax_of_deepseek_v3() -> None:
    """4096 x 129280 x (2 bf16 + 4 fp32) = 3,177,185,280 bytes, one micro-batch, tp 1."""
    size = logits_bytes(tokens=TOKENS, vocab=129_280, tp=1, depths=1, per_logit_bytes=6)
    assert size == 3_177_185_280


def test_experts_without_replicas_get_no_saving_from_the_distributed_optimizer() -> None:
    """8 devices, ep 8: dp is 8 (7.5 bytes per dense parameter) but edp is 1 (18 bytes per expert parameter)."""
    where = context(mixtral_8x7b(), 8, global_batch=8)
    dense, expert = replica_groups(where, PlanTable.from_plans([plan(where, "ep=8")]))
    assert dense.kept.total == 7.5
    assert expert.kept.total == 18.0
