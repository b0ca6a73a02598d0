"""What the runtime does not run is refused by name, without PyTorch; what a model is made of reaches the modules."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from ap_search import load_model
from ap_search.errors import SpecError
from ap_search.plan.plan import Dispatcher, Plan, Schedule
from ap_search.runtime.settings import RunSettings, state_widths
from ap_search.runtime.support import check_supported, unsupported
from ap_search.spec.blocks import LinearMixer, Model
from tests.runtime.small import SETTINGS, model, plan


def _faults(of: Model, chosen: Plan, settings: RunSettings = SETTINGS) -> str:
    """All faults, one line each."""
    return "\n".join(str(fault) for fault in unsupported(of, chosen, settings))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cp=2", "--plan cp: context parallelism 2 is not run (legal: 1)"),
        ("pp=2,schedule=zb_h1", "--plan schedule: schedule zb_h1 is not run (legal: 1f1b interleaved gpipe)"),
        ("pp=2,schedule=dualpipe", "--plan schedule: schedule dualpipe is not run"),
        ("pp=2,schedule=interleaved", "--plan schedule: schedule interleaved does not go with vpp=1"),
        ("ep=2,dispatcher=hybridep", "--plan dispatcher: dispatcher hybridep is not run (legal: allgather alltoall"),
        ("recompute=selective:moe_act", "--plan recompute: recompute selective:moe_act is not run (legal: none full)"),
        ("tp=2,sp=0", "--plan sp: experts behind tensor parallelism need sequence parallelism"),
        ("tp=4", "--plan tp: 4 does not divide 2 (key heads) (legal: a divisor of 2)"),
        ("pp=2,stage_layers=2+0", "--plan stage_layers: empty stages are not run"),
        ("pp=2,ep=2,sharding=hsdp", "--plan sharding: 2 replicas do not divide dp=2 and edp=1"),
    ],
)
def test_plans_are_refused_by_name(text: str, line: str) -> None:
    """Path, reason, legal values."""
    assert line in _faults(model(), plan(text, model()))


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_shards_that_would_be_padded_are_refused(sharding: str) -> None:
    """A hidden size of 34: neither dp=4 nor edp=4 divides it, and the prediction counts no padding."""
    odd = model(hidden_size=34)
    text = _faults(odd, plan(f"sharding={sharding}", odd))
    assert "--plan sharding: 4 shards (dp) would be padded: they do not divide 34 (legal: none, or dp that" in text
    assert "4 shards (edp) would be padded" in text
    assert _faults(odd, plan("sharding=none", odd)) == ""
    assert _faults(odd, plan(f"pp=2,sharding={sharding}", odd)) == ""


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"mtp_layers": 1}, "model: mtp_layers: multi-token prediction is not run (legal: 0)"),
        ({"learned_positions": 64}, "model: learned_positions: learned positions are not run"),
        ({"head_bias": True}, "model: head_bias: a bias on the head is not run"),
        ({"num_norms": 4}, "model: kinds[0].num_norms: 4 norms are not run (legal: 2)"),
        ({"attention": {"window": 8}}, "model: kinds[0].attention.window: a window is not run"),
        ({"attention": {"qkv_bias": True}}, "model: kinds[0].attention.qkv_bias: qkv_bias is not run"),
        ({"attention": {"sink": True}}, "model: kinds[0].attention.sink: sink is not run"),
        ({"attention": {"qk_norm": "width"}}, "attention.qk_norm: a norm over all heads is not run (legal: none head)"),
        ({"ffn": {"width": 64, "bias": True}}, "model: kinds[0].ffn.bias: biases of a feed-forward are not run"),
        ({"moe": {"expert_bias": True}}, "model: kinds[1].moe.expert_bias: biases of experts are not run"),
        ({"moe": {"score_function": "tanh"}}, "moe.score_function: 'tanh' scores are not run (legal: softmax sigmoid)"),
    ],
)
def test_models_are_refused_by_name(changes: dict[str, Any], line: str) -> None:
    """Each kind that a model file can name and the runtime cannot run."""
    small = model(**changes)
    assert line in _faults(small, plan("ep=2", small))


def test_presets_of_other_kinds_are_refused() -> None:
    """MLA and MTP of DeepSeek-V3, both at once; a scan instead of attention."""
    deepseek = load_model("deepseek-v3")
    faults = _faults(deepseek, plan("ep=2", deepseek))
    assert "attention.kind: mla is not run (legal: gqa)" in faults
    assert "model: mtp_layers" in faults
    small = model()
    scan = LinearMixer(name="mamba2", in_width=64, out_width=32, small_params=8, scan_flops_per_token=100, heads=4)
    mixed = replace(small, kinds=(replace(small.kinds[0], mixer=scan), *small.kinds[1:]))
    assert "model: kinds[0].mixer: mamba2 is not run (legal: gqa attention)" in _faults(mixed, plan("ep=2", mixed))


def test_tied_embeddings_stay_on_one_stage() -> None:
    """A second copy on the last stage is priced, but not run."""
    tied = model(tied_embeddings=True)
    assert "--plan pp: tied embeddings on two pipeline stages are not run" in _faults(tied, plan("pp=2", tied))
    assert not unsupported(tied, plan("ep=2", tied), SETTINGS)


def test_settings_are_checked_too() -> None:
    """Sequence length, padding, micro-batches."""
    small = model()
    odd = replace(SETTINGS, seq_len=7)
    assert "--seq-len: tp=2 does not divide it (legal: a multiple of 2)" in _faults(small, plan("tp=2", small), odd)
    padded = replace(SETTINGS, pad_to_capacity=True)
    assert "--pad-to-capacity: needs a capacity factor" in _faults(small, plan("ep=2", small), padded)
    few = replace(plan("pp=2", small), num_microbatches=1)
    assert "--global-batch: 1 micro-batches cannot fill 2 stages (legal: at least 2 micro-batches)" in _faults(
        small, few
    )
    interleaved = replace(plan("pp=2", small), vpp=2, schedule=Schedule.INTERLEAVED, num_microbatches=5)
    assert "--global-batch: interleaving needs whole rounds" in _faults(small, interleaved)


def test_all_faults_are_reported_at_once() -> None:
    """One error for everything, and none for what runs."""
    small = model()
    chosen = replace(plan("cp=2", small), dispatcher=Dispatcher.HYBRIDEP)
    with pytest.raises(SpecError) as caught:
        check_supported(small, chosen, SETTINGS)
    assert [fault.path for fault in caught.value.faults] == ["--plan cp", "--plan dispatcher"]
    check_supported(small, plan("tp=2,ep=2,etp=2", small), SETTINGS)


def test_refusing_needs_no_pytorch() -> None:
    """The rules are known where the extra is not installed."""
    code = "import sys; import ap_search.runtime.support; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("dtype", "gathered", "widths"),
    [
        ("float32", False, (4, 4, 0, 8)),
        ("float64", True, (8, 8, 0, 16)),
        ("bfloat16", False, (2, 4, 4, 8)),
        ("bfloat16", True, (4, 4, 0, 8)),
    ],
)
def test_bytes_per_parameter(dtype: Any, gathered: bool, widths: tuple[int, ...]) -> None:
    """18 bytes in mixed precision, 16 where FSDP's shards are the master weights."""
    assert state_widths(RunSettings(dtype=dtype), gathered=gathered) == widths
