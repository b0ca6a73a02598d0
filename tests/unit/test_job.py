"""Jobs made of flags: defaults filled in and named, every fault at once under the flag's name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ap_search.errors import SpecError
from ap_search.spec.blocks import Attention, DenseFfn, LayerKind, Model, MoeFfn
from ap_search.spec.cluster import load_cluster
from ap_search.spec.job import Job, Load, PlacementPolicy, Precision, Target
from ap_search.spec.machine import Machine
from ap_search.spec.make_job import make_job

GIB = 2**30


@pytest.fixture(scope="module")
def machine() -> Machine:
    return replace(load_cluster("h100-sxm"), device_memory_bytes=80 * GIB, reserve_bytes=5 * GIB)


def model(*, num_experts: int = 8, learned_positions: int = 0) -> Model:
    attention = Attention(num_heads=4, num_kv_heads=4, qk_head_dim=16, v_head_dim=16)
    experts = MoeFfn(num_experts=num_experts, top_k=2, expert_width=64) if num_experts else DenseFfn(width=64)
    return Model(
        name="toy",
        hidden_size=64,
        vocab_size=100,
        tied_embeddings=False,
        kinds=(LayerKind(mixer=attention, ffn=DenseFfn(width=64)), LayerKind(mixer=attention, ffn=experts)),
        layers=(0, 1, 1),
        learned_positions=learned_positions,
    )


def make(machine: Machine, **given: object) -> Job:
    return make_job(**({"machine": machine, "model": model(), "devices": 16} | given))  # type: ignore[arg-type]


def faults(machine: Machine, **given: object) -> list[str]:
    with pytest.raises(SpecError) as caught:
        make(machine, **given)
    return [str(fault) for fault in caught.value.faults]


def test_defaults_are_filled_in_and_named(machine: Machine) -> None:
    job = make(machine)
    assert (job.devices, job.global_batch, job.seq_len) == (16, 1024, 4096)
    assert (job.precision, job.target, job.capacity_factor) == (Precision.BF16, Target.ANY, 0.0)
    assert (job.memory_limit_bytes, job.reserve_bytes) == (80 * GIB, 5 * GIB)
    assert job.load.shares is None
    assert job.assumed == (
        "global_batch",
        "seq_len",
        "precision",
        "memory_limit_bytes",
        "reserve_bytes",
        "load",
        "placement",
        "redundant_experts",
        "capacity_factor",
        "pad_to_capacity",
        "target",
    )


def test_what_is_given_is_taken_and_not_assumed(machine: Machine) -> None:
    job = make(
        machine,
        devices=np.int64(32),
        global_batch=1024,
        seq_len=1,
        precision="fp8",
        memory_limit_gib=40.5,
        reserve_gib=0,
        load="zipf:1",
        placement="ideal",
        redundant_experts=8,
        capacity_factor=1.25,
        pad_to_capacity=True,
        target="megatron",
    )
    assert (job.devices, job.global_batch, job.seq_len) == (32, 1024, 1)
    assert type(job.devices) is int
    assert (job.precision, job.target, job.capacity_factor) == (Precision.FP8, Target.MEGATRON, 1.25)
    assert (job.memory_limit_bytes, job.reserve_bytes) == (int(40.5 * GIB), 0)
    assert job.load.shares is not None
    assert job.load.shares.shape == (1, 8)
    assert (job.placement, job.redundant_experts, job.pad_to_capacity) == (PlacementPolicy.IDEAL, 8, True)
    assert job.assumed == ()


@pytest.mark.parametrize("value", ["EPLB", "", 1, True])
def test_placement_is_one_of_four_words(machine: Machine, value: object) -> None:
    (line,) = faults(machine, placement=value)
    assert line.startswith("--placement: is ")
    assert line.endswith("(legal: contiguous, eplb, lplb, ideal)")


@pytest.mark.parametrize("value", [-1, 2**16 + 1, 1.5, "8", True])
def test_redundant_experts_are_a_whole_number(machine: Machine, value: object) -> None:
    (line,) = faults(machine, placement="eplb", redundant_experts=value)
    assert line.startswith("--redundant-experts: is ")
    assert line.endswith("(legal: a whole number from 0 to 65536)")


def test_experts_in_order_have_no_copies(machine: Machine) -> None:
    assert make(machine, placement="contiguous", redundant_experts=0).redundant_experts == 0
    assert faults(machine, redundant_experts=8) == [
        "--redundant-experts: is 8, but contiguous placement has no copies (legal: 0, or --placement eplb, lplb, ideal)"
    ]


def test_a_dense_model_has_nothing_to_place(machine: Machine) -> None:
    assert faults(machine, model=model(num_experts=0), placement="eplb", redundant_experts=8) == [
        "--placement: is eplb, but the model has no routed experts (legal: contiguous)",
        "--redundant-experts: is 8, but the model has no routed experts (legal: 0)",
    ]


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "hyperparallel", "deepspeed"])
def test_trainers_keep_experts_in_order(machine: Machine, target: str) -> None:
    assert faults(machine, placement="lplb", target=target) == [
        f"--placement: is lplb, but {target} keeps experts in order (legal: contiguous, or --target any)"
    ]
    assert make(machine, placement="ideal", target=target).placement is PlacementPolicy.IDEAL


def test_an_enumeration_is_a_word_too(machine: Machine) -> None:
    assert make(machine, precision=Precision.FP8, target=Target.DEEPSPEED).precision == Precision.FP8


@pytest.mark.parametrize("value", [0, -1, 2**20 + 1, 1.0, "16", True, None, [16], float("nan")])
def test_devices_are_a_positive_whole_number(machine: Machine, value: object) -> None:
    (line,) = faults(machine, devices=value)
    assert line.startswith("--devices: is ")
    assert line.endswith("(legal: a whole number from 1 to 1048576)")


@pytest.mark.parametrize("value", [0, -1, 2**24 + 1, 1.5, "4096", False])
@pytest.mark.parametrize(("flag", "name"), [("--global-batch", "global_batch"), ("--seq-len", "seq_len")])
def test_sizes_are_positive_whole_numbers(machine: Machine, flag: str, name: str, value: object) -> None:
    (line,) = faults(machine, **{name: value})
    assert line.startswith(f"{flag}: is ")
    assert line.endswith("(legal: a whole number from 1 to 16777216)")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 10**400, "80", True])
def test_the_memory_limit_is_a_positive_number(machine: Machine, value: object) -> None:
    (line,) = faults(machine, memory_limit_gib=value)
    assert line.startswith("--memory-limit-gib: is ")


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "1", True])
def test_the_reserve_is_a_number_of_at_least_zero(machine: Machine, value: object) -> None:
    (line,) = faults(machine, reserve_gib=value)
    assert line.startswith("--reserve-gib: is ")


def test_the_reserve_is_below_the_limit(machine: Machine) -> None:
    assert faults(machine, memory_limit_gib=10, reserve_gib=10) == [
        "--reserve-gib: leaves nothing: 10 GiB are reserved of 10 GiB "
        "(legal: a reserve (--reserve-gib) below the limit (--memory-limit-gib))"
    ]
    assert faults(machine, memory_limit_gib=4)[0].startswith(
        "--memory-limit-gib: leaves nothing: 5 GiB are reserved of 4 GiB"
    )
    assert faults(machine, reserve_gib=80)[0].startswith("--reserve-gib: leaves nothing")


@pytest.mark.parametrize("value", ["fp16", "BF16", "", 8, True])
def test_precision_is_one_of_three_words(machine: Machine, value: object) -> None:
    (line,) = faults(machine, precision=value)
    assert line.startswith("--precision: is ")
    assert line.endswith("(legal: bf16, fp8, mxfp8)")


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_precision_is_one_that_the_device_has(precision: str) -> None:
    (line,) = faults(load_cluster("a100-80-sxm"), precision=precision)
    assert line.startswith(f"--precision: is {precision}, but ")
    assert line.endswith("has no fp8 arithmetic (legal: bf16)")


def test_block_scaled_fp8_needs_a_device_that_has_it() -> None:
    """Hopper multiplies fp8, but not MXFP8; Blackwell does both."""
    (line,) = faults(load_cluster("h100-sxm"), precision="mxfp8")
    assert line.endswith("has no block-scaled fp8 arithmetic (legal: bf16, fp8)")
    assert make(load_cluster("b200-sxm"), precision="mxfp8").precision == "mxfp8"


@pytest.mark.parametrize("value", ["megatron-lm", "", 1])
def test_target_is_one_of_the_frameworks(machine: Machine, value: object) -> None:
    (line,) = faults(machine, target=value)
    assert line.endswith("(legal: any, megatron, torchtitan, hyperparallel, deepspeed)")


def test_a_position_table_limits_the_sequence(machine: Machine) -> None:
    assert make(machine, model=model(learned_positions=2048), seq_len=2048).seq_len == 2048
    (line,) = faults(machine, model=model(learned_positions=2048))
    assert line == ("--seq-len: is 4096, but toy has learned positions for 2048 tokens (legal: up to 2048)")
    assert len(faults(machine, model=model(learned_positions=2048), seq_len=0)) == 1


@pytest.mark.parametrize("value", [-1, float("nan"), 9, "1.25", True])
def test_the_capacity_factor_is_at_most_the_number_of_experts(machine: Machine, value: object) -> None:
    """With a factor of E an expert could take every copy: more means nothing."""
    (line,) = faults(machine, capacity_factor=value)
    assert line.startswith("--capacity-factor: is ")
    assert line.endswith("(legal: a number from 0 to 8)")


def test_torchtitan_has_no_capacity(machine: Machine) -> None:
    assert faults(machine, capacity_factor=1.25, target="torchtitan") == [
        "--capacity-factor: is 1.25, but torchtitan drops no tokens (legal: 0, or --target any)"
    ]
    assert make(machine, capacity_factor=0, target="torchtitan").capacity_factor == 0


def test_padding_needs_a_capacity_that_a_rank_can_fill(machine: Machine) -> None:
    """8 experts, top-2: above a factor of 4 an expert has more slots than a rank has tokens."""
    for factor in (None, 0.0):
        assert faults(machine, capacity_factor=factor, pad_to_capacity=True) == [
            "--pad-to-capacity: is set, but there is no capacity to pad to (legal: off, or a --capacity-factor above 0)"
        ]
    assert make(machine, capacity_factor=4, pad_to_capacity=True).pad_to_capacity
    assert faults(machine, capacity_factor=4.5, pad_to_capacity=True) == [
        "--pad-to-capacity: is set, but capacity at 4.5 is more than a rank's tokens (legal: a factor up to 4)"
    ]
    assert faults(machine, pad_to_capacity="yes")[0].startswith("--pad-to-capacity: is ")
    dense = faults(machine, model=model(num_experts=0), pad_to_capacity=True)
    assert dense == ["--pad-to-capacity: is set, but the model has no routed experts (legal: off)"]


def test_a_dense_model_has_no_load_and_no_capacity(machine: Machine) -> None:
    dense = model(num_experts=0)
    assert make(machine, model=dense, load="balanced").load.shares is None
    lines = faults(machine, model=dense, load="zipf:1", capacity_factor=1.0)
    assert [line.split(":")[0] for line in lines] == ["--load", "--capacity-factor"]
    (line,) = faults(machine, model=dense, load=Load(name="mine", shares=np.ones((1, 8)) / 8))
    assert line == "--load: holds shares of the shape (1, 8) (legal: balanced)"


def test_a_load_has_the_models_shape(machine: Machine) -> None:
    mine = Load(name="mine", shares=np.full((2, 8), 0.125))
    assert make(machine, load=mine).load is mine
    (line,) = faults(machine, load=Load(name="mine", shares=np.full((3, 8), 0.125)))
    assert line == "--load: holds shares of the shape (3, 8) (legal: shares of the shape (1, 8) or (2, 8))"


def test_a_histogram_is_read_for_the_models_moe_layers(machine: Machine, tmp_path: Path) -> None:
    """Two of the three layers are MoE."""
    path = tmp_path / "load.csv"
    path.write_text("1,1,1,1,1,1,1,1\n1,1,1,1,1,1,1,9\n")
    shares = make(machine, load=path).load.shares
    assert shares is not None
    assert shares.shape == (2, 8)


def test_all_faults_come_at_once(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_text("1,1\n-1,1,1,1,1,1,1,9\n")
    lines = faults(
        machine,
        devices=0,
        global_batch="many",
        seq_len=-4,
        precision="fp4",
        memory_limit_gib=0,
        reserve_gib=-1,
        load=path,
        capacity_factor=-1,
        target="none",
    )
    assert [line.split(":")[0] for line in lines] == [
        "--memory-limit-gib",
        "--reserve-gib",
        "--devices",
        "--global-batch",
        "--seq-len",
        "--precision",
        "load.csv",
        "load.csv",
        "--capacity-factor",
        "--target",
    ]
