"""Parameters per rank and their bytes, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.replicas import hsdp_replicas, replica_groups
from ap_search.cost.state import (
    BlockParams,
    block_params,
    bucket_bytes,
    padded_vocab,
    param_bytes,
    shard_degrees,
)
from ap_search.plan.mesh import Placement
from ap_search.plan.plan import Sharding
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import Model
from tests.cost_cases import PLAIN, V3_MOE, context, deepseek_v3, mixtral_8x7b, model, plan, price, small_model


def params(which: Model, text: str, *, devices: int = 64) -> BlockParams:
    """Parameters per rank of every block under one plan."""
    where = context(which, devices)
    return block_params(which, PLAIN, PlanTable.from_plans([plan(where, text)]))


def test_vocabulary_pads_over_many_degrees_at_once() -> None:
    """1000 rows to multiples of 128, 256, 1024: 1024, 1024, 1024; 1025 to 1152, 1280, 2048."""
    assert padded_vocab(1000, divisor=128, tp=np.array([1, 2, 8])).tolist() == [1024, 1024, 1024]
    assert padded_vocab(1025, divisor=128, tp=np.array([1, 2, 8])).tolist() == [1152, 1280, 2048]


@pytest.mark.parametrize(
    ("sharding", "degrees", "per_param"),
    [
        (Sharding.NONE, (1, 1, 1), 18.0),
        (Sharding.ZERO1, (1, 1, 8), 2 + 4 + 12 / 8),
        (Sharding.ZERO2, (1, 8, 8), 2 + 16 / 8),
        (Sharding.ZERO3, (8, 8, 8), 18 / 8),
        (Sharding.HSDP, (4, 4, 4), 18 / 4),
    ],
)
def test_what_each_sharding_splits(sharding: Sharding, degrees: tuple[int, int, int], per_param: float) -> None:
    """Weights, gradients, optimizer over 8 ranks, or the 4 of one replica under HSDP; 18 bytes in all."""
    split = shard_degrees(np.array([sharding]), group=8, inner=4)
    assert (split.weights, split.gradients, split.optimizer) == degrees
    assert param_bytes(PLAIN, split).total == per_param


def test_bytes_per_parameter_follow_the_software() -> None:
    """fp32 weights that are their own master: (4 + 4 + 8)/8 = 2; bf16 gradients and moments: 2 + 2 + 4 + 4 = 12."""
    titan = replace(PLAIN, weight_bytes=4, master_bytes=0)
    assert param_bytes(titan, shard_degrees(Sharding.ZERO3, group=8, inner=8)).total == 2.0
    lean = replace(PLAIN, gradient_bytes=2, moment_bytes=4)
    assert param_bytes(lean, shard_degrees(Sharding.NONE, group=8, inner=8)).total == 12.0


def test_mixtral_layer_embedding_and_head() -> None:
    """tp2 ep8: attention 41,943,040/2 + norms 8,192; router 32,768; one expert of 176,160,768; vocab 32,000 x 2,048.

    Blocks in order: the layer kind, embedding, MTP module (layer, 2h x h /2, three norms), head with the final norm.
    """
    found = params(mixtral_8x7b(), "tp=2,pp=4,ep=8")
    layer = 20_971_520 + 8_192
    assert found.dense[0].tolist() == [layer, 65_536_000, layer + 4096 * 4096 + 3 * 4096, 65_536_000 + 4096]
    assert found.router[0].tolist() == [32_768, 0, 32_768, 0]
    assert found.expert[0].tolist() == [176_160_768, 0, 176_160_768, 0]


def test_etp_splits_experts_and_tp_does_not() -> None:
    """8 experts of 176,160,768 parameters over ep 2 x etp 4, whatever tp is."""
    for tp in (1, 4):
        assert params(mixtral_8x7b(), f"tp={tp},ep=2,etp=4").expert[0, 0] == 176_160_768


def test_mla_down_projections_are_whole_on_every_tensor_rank() -> None:
    """DeepSeek-V3: 187,107,328 of attention, 7168 (1536 + 576) + 1536 + 512 = 15,140,864 of them not split.

    At tp 8: 171,966,464/8 + 15,140,864 + norms 2 x 7168 + feed-forward 3 x 7168 x 18432/8.
    """
    dense = params(deepseek_v3(), "tp=8").dense[0, 0]
    assert dense == 171_966_464 / 8 + 15_140_864 + 14_336 + 49_545_216


def test_shared_experts_split_over_tp_like_a_dense_layer() -> None:
    """44,040,192 of shared experts: at tp 8 the MoE layer holds an eighth of them, router 1,835,008 apart."""
    found = params(deepseek_v3(), "tp=8,ep=8")
    attention = 171_966_464 / 8 + 15_140_864 + 14_336
    assert found.dense[0, 1] == attention + 44_040_192 / 8
    assert found.router[0, 1] == 1_835_008
    assert found.expert[0, 1] == 11_274_289_152 / 8


@pytest.mark.parametrize(("pp", "head"), [(1, 1024), (2, 1024 + 4096 * 1024)])
def test_tied_embeddings_are_copied_to_the_last_of_several_stages(pp: int, head: int) -> None:
    """4096 rows of 1024; the final norm is 1024."""
    found = params(small_model(tied=True, mtp_layers=0), f"pp={pp}")
    assert found.dense[0, -1] == head
    assert found.dense[0, -3] == 4096 * 1024


@pytest.mark.parametrize(("mtp_layers", "pp", "copies"), [(0, 2, 1), (1, 1, 1), (1, 2, 2)])
def test_an_mtp_stage_holds_an_embedding_of_its_own(mtp_layers: int, pp: int, copies: int) -> None:
    """Beside the untied head: only where MTP modules do not share the first stage's embedding."""
    found = params(small_model(mtp_layers=mtp_layers), f"pp={pp}")
    assert found.dense[0, -1] == copies * 4096 * 1024 + 1024


def test_an_mtp_module_holds_the_kind_that_the_model_names() -> None:
    """Kind 0 (dense) instead of the last layer's: no experts, and 2h x h + 3h more than that layer."""
    which = replace(small_model(), mtp_kind_index=0)
    found = params(which, "tp=1")
    assert found.expert[0, -2] == found.router[0, -2] == 0
    assert found.dense[0, -2] == found.dense[0, 0] + 2 * 1024 * 1024 + 3 * 1024


def test_learned_positions_and_head_bias() -> None:
    """512 positions of 1024 are whole on every rank; a bias per padded row is split: 4096/2."""
    which = replace(small_model(mtp_layers=0), learned_positions=512, head_bias=True)
    found = params(which, "tp=2")
    assert found.dense[0, -3] == 4096 * 512 + 512 * 1024
    assert found.dense[0, -1] == 4096 * 512 + 1024 + 2048


@pytest.mark.parametrize(
    ("sharding", "size"),
    [
        (Sharding.NONE, 0),
        (Sharding.ZERO1, 0),
        (Sharding.ZERO2, 40_000_000 * 4),
        (Sharding.ZERO3, 2 * 10_000_000 * 6),
        (Sharding.HSDP, 2 * 10_000_000 * 6),
    ],
)
def test_live_buckets_and_units(sharding: Sharding, size: int) -> None:
    """50 M parameters of which the largest block has 10 M, over 8 ranks: one bucket of 40 M, or two units."""
    assert bucket_bytes(PLAIN, sharding=sharding, params=5e7, largest=1e7, group=8) == size
    assert bucket_bytes(PLAIN, sharding=sharding, params=5e7, largest=1e7, group=1) == 0


def test_buckets_and_units_are_no_larger_than_the_stage() -> None:
    """10 M parameters in one block: 10 M x 4 and 10 M x 6 bytes; fp32 shards are gathered in 16 bits."""
    assert bucket_bytes(PLAIN, sharding=Sharding.ZERO2, params=1e7, largest=1e7, group=8) == 4e7
    assert bucket_bytes(PLAIN, sharding=Sharding.ZERO3, params=1e7, largest=1e7, group=8) == 6e7
    titan = replace(PLAIN, weight_bytes=4, master_bytes=0)
    assert bucket_bytes(titan, sharding=Sharding.ZERO3, params=1e7, largest=1e7, group=8) == 6e7


def test_hsdp_shards_inside_a_domain() -> None:
    """64 H100 in 8 domains: dp 64 makes 8 replicas of 8; experts at ep 8 lie in the domain, so edp 8 is not sharded."""
    where = context(mixtral_8x7b(), 64)
    table = PlanTable.from_plans([plan(where, "ep=8,sharding=hsdp"), plan(where, "ep=8,sharding=zero3")])
    dense, expert = replica_groups(where, table)
    assert dense.shard.tolist() == [8, 64]
    assert expert.shard.tolist() == [1, 8]
    assert hsdp_replicas(table, Placement(np.array([8, 8]), np.array([8, 8]))).tolist() == [8, 1]
    units = price(where, "ep=8,sharding=hsdp").memory.stages[0].buffers_bytes
    assert units - (32 + 128) * 2**20 == 2 * (32_000 * 4096 + 4096) * 6, "no units of experts that are whole anyway"


def test_context_parallel_ranks_share_the_dense_state_but_not_experts() -> None:
    """dp 4 x cp 2 shards dense optimizer state over 8; 8 devices at ep 4 leave edp 2."""
    where = context(mixtral_8x7b(), 8, global_batch=8)
    dense, expert = replica_groups(where, PlanTable.from_plans([plan(where, "cp=2,ep=4")]))
    assert (dense.size[0], expert.size[0]) == (8, 2)


def test_stage_state_is_the_sum_of_its_blocks() -> None:
    """A single MoE layer of DeepSeek-V3 on one device: weights of expert, shared and router parts are 2 bytes each."""
    which = model("one", 7168, 129_280, [V3_MOE])
    stage = price(context(which, 1, global_batch=1), "tp=1").memory.stages[0]
    assert stage.expert.weights_bytes == 2 * 11_274_289_152
    assert stage.router_bytes == 18 * 1_835_008
    assert stage.shared.weights_bytes == 2 * (187_107_328 + 14_336 + 44_040_192 + 2 * 129_280 * 7168 + 7168)
