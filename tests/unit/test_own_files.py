"""Models, machines, profiles and histograms of the user's own, from files, through the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.documented_json import ANSWER, strays
from tests.unit.test_end_to_end import THREE_BY_FOUR, TOY, answer

NARROW = ["--set", "mbs=1", "--set", "recompute=none", "--set", "vpp=1", "--set", "sharding=zero1,zero3", "--top", "2"]

OWN_MODEL = """
hidden_size: 256
vocab_size: 1000
num_layers: 2
attention: {num_heads: 4, num_kv_heads: 2, head_dim: 64}
ffn: {width: 512}
"""
MIXTRAL_LIKE = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


def test_a_model_file_of_ours(tmp_path: Path) -> None:
    """Attention 256*(4+4)*64 + 256*256 = 196,608, FFN 3*256*512 = 393,216, norms 512: 590,336 a layer, two of them;
    both embeddings 2*1000*256 = 512,000 and the last norm 256 make 1,692,928."""
    path = tmp_path / "mine.yaml"
    path.write_text(OWN_MODEL)
    found = answer("--model", str(path), "--devices", "4", *NARROW)
    assert list(strays(found, ANSWER)) == []
    assert found["model"]["name"] == "mine"
    assert found["model"]["params_total"] == found["model"]["params_active"] == 1_692_928
    assert (found["model"]["dense_layers"], found["model"]["moe_layers"]) == ([0, 1], [])
    assert {(plan["plan"]["ep"], plan["plan"]["etp"]) for plan in found["plans"]} == {(1, 1)}


def test_a_hugging_face_config(tmp_path: Path) -> None:
    """Attention 196,608, 4 experts of 393,216, router 4*256, norms 512: 1,771,008 a layer, two of them; 512,256 beside
    them make 4,054,272. Of the experts a token passes 2: 1,572,864 less."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL_LIKE))
    found = answer("--model", str(path), "--devices", "4", "--set", "ep=4", *NARROW)
    assert found["model"]["params_total"] == 4_054_272
    assert found["model"]["params_active"] == 4_054_272 - 1_572_864
    assert (found["model"]["num_experts"], found["model"]["top_k"]) == (4, 2)
    assert {plan["plan"]["ep"] for plan in found["plans"]} == {4}


def test_experts_inside_a_vision_models_text_config(tmp_path: Path) -> None:
    """An expert count that is read at the top level only makes such a model look dense and forces ep = 1.

    Source: PrimeIntellect-ai/prime-rl#2868.
    """
    path = tmp_path / "config.json"
    text = {**MIXTRAL_LIKE, "model_type": "mixtral"}
    del text["architectures"]
    wrapper = {"architectures": ["SomeVLForConditionalGeneration"], "model_type": "some_vl", "text_config": text}
    path.write_text(json.dumps({**wrapper, "vision_config": {"hidden_size": 64, "depth": 2}}))
    found = answer("--model", str(path), "--devices", "4", "--set", "ep=2,4", *NARROW)
    assert found["model"]["num_experts"] == 4
    assert found["plans"]
    assert any("vision" in warning for warning in found["model"]["warnings"])


def test_a_cluster_file_and_its_assumptions(tmp_path: Path) -> None:
    path = tmp_path / "three-by-four.yaml"
    path.write_text(THREE_BY_FOUR)
    found = answer("--model", "toy-moe", "--devices", "4", "--cluster", str(path), *NARROW)
    assert found["cluster"]["name"] == "three-by-four"
    assert found["cluster"]["device_memory_bytes"] == 81559 * 2**20
    assert "network_latency_us" in found["cluster"]["assumed"]


def best_with(tmp_path: Path, *flags: str) -> dict[str, Any]:
    plan: dict[str, Any] = answer("estimate", *TOY, "--plan", "ep=8", *flags)["plans"][0]
    return plan


def test_a_profile_file(tmp_path: Path) -> None:
    """Without fp32 gradients, 2 bytes a parameter instead of 4."""
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ngradient_bytes: 2\n")
    before, after = best_with(tmp_path), best_with(tmp_path, "--software", str(path))
    sizes = [plan["memory"]["stages"][0]["expert"]["gradients_bytes"] for plan in (before, after)]
    assert sizes[0] == 2 * sizes[1] > 0


def test_histograms(tmp_path: Path) -> None:
    """A uniform one equals balanced, in seconds and bytes; one that sends all to one expert is slower and larger."""
    uniform, skewed = tmp_path / "uniform.csv", tmp_path / "skewed.json"
    uniform.write_text("5,5,5,5,5,5,5,5\n")
    skewed.write_text(json.dumps({"tokens_per_expert": [8, 0, 0, 0, 0, 0, 0, 0]}))
    balanced, even, uneven = (
        best_with(tmp_path, *flags) for flags in ([], ["--load", str(uniform)], ["--load", str(skewed)])
    )
    assert even["step_time_s"] == pytest.approx(balanced["step_time_s"], rel=1e-12)
    assert even["peak_memory_bytes"] == balanced["peak_memory_bytes"]
    assert uneven["step_time_s"] > balanced["step_time_s"]
    assert uneven["peak_memory_bytes"] > balanced["peak_memory_bytes"]
    assert uneven["time"]["imbalance_s"] > 0 == balanced["time"]["imbalance_s"]


def test_less_memory_leaves_fewer_plans() -> None:
    counts = [
        answer(*TOY, "--set", "ep=1,8", "--set", "vpp=1", "--reserve-gib", "2.5", "--memory-limit-gib", limit)[
            "search"
        ]["feasible"]
        for limit in ("80", "2.9")
    ]
    assert counts[0] > counts[1] > 0


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "hyperparallel", "deepspeed"])
def test_a_target_only_takes_plans_away(target: str) -> None:
    everything = answer(*TOY, *NARROW)
    some = answer(*TOY, *NARROW, "--target", target)
    assert 0 < some["search"]["priced"] <= everything["search"]["priced"]
    assert some["search"]["candidates"] == everything["search"]["candidates"]
    assert some["job"]["target"] == target
