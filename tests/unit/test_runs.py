"""Published rows in their own words: what is read, what is assumed and named, what is not modelled."""

import pytest

from ap_search.plan.text import RECOMPUTE_MODULES
from ap_search.spec import published_plan
from ap_search.spec.hardware import Hardware, machine_for
from ap_search.spec.published import read_published
from ap_search.spec.run import CudaGraphs, FlopsRule, MemoryKind, MemoryStage, Run, Unusable, UnusableError, UnusableRun
from ap_search.units import GIB, MIB

DENSE = {"name": "d", "kind": "dense", "layers": 32, "hidden": 4096, "ffn": 11008, "heads": 32, "vocab": 32000}
MOE = DENSE | {"kind": "moe", "num_experts": 8, "top_k": 2, "moe_ffn": 1024}


def published(**changes):
    """A published row that states everything, with what a test changes; None takes a field away."""
    row = {
        "id": "r",
        "source": "Some trainer, page 3; somewhere",
        "quality": "A",
        "model": DENSE,
        "hardware": {"gpu": "H100-SXM-80GB", "count": 64, "mem_gb": 80, "gpus_per_nvlink_domain": 8},
        "parallel": {"tp": 2, "pp": 4, "cp": 1, "sequence_parallel": True, "zero": 1, "fsdp": 0},
        "global_batch": 256,
        "micro_batch": 1,
        "seq_len": 4096,
        "precision": "bf16",
        "recompute": "none",
        "measured": {"step_time_s": 5.0},
        "notes": "",
    }
    for key, value in changes.items():
        row[key] = {**row[key], **value} if isinstance(value, dict) and isinstance(row.get(key), dict) else value
    return read_published(row, "rows: 1")


def fields(run):
    return {line.split(":")[0] for line in run.assumed}


def test_a_row_that_states_everything_assumes_nothing():
    run = published()
    assert isinstance(run, Run)
    assert run.assumed == ()
    assert run.plan == "tp=2,pp=4,vpp=1,cp=1,mbs=1,sp=1,sharding=zero1,recompute=none,schedule=1f1b"
    assert (run.devices, run.global_batch, run.seq_len, run.precision) == (64, 256, 4096, "bf16")
    assert run.machine.name == run.label.hardware == "h100-sxm"
    assert run.measured.step_time_s == 5.0


def test_absent_values_are_assumed_and_named():
    run = published(
        model=MOE | {"vocab": None, "top_k": None},
        parallel={"zero": None, "sequence_parallel": None, "cp": None, "ep": 4},
        micro_batch=None,
        recompute=None,
    )
    assert fields(run) == {
        "vocab",
        "top_k",
        "zero",
        "sequence_parallel",
        "cp",
        "etp",
        "dispatcher",
    }
    assert run.unknown == ("mbs", "recompute", "vpp")
    assert "dispatcher: not stated, alltoall" in run.assumed


@pytest.mark.parametrize(
    ("changes", "why", "reason"),
    [
        ({"parallel": {"tp": None}}, Unusable.SKIPPED, "parallel.tp is missing"),
        ({"seq_len": None}, Unusable.SKIPPED, "seq_len is missing"),
        ({"global_batch": None}, Unusable.SKIPPED, "global_batch is missing"),
        ({"hardware": {"count": None}}, Unusable.SKIPPED, "hardware.count is missing"),
        ({"model": DENSE | {"hidden": None}}, Unusable.SKIPPED, "model.hidden is missing"),
        ({"model": DENSE | {"layers": None}}, Unusable.SKIPPED, "model.layers is missing"),
        ({"model": DENSE | {"kind": "hybrid"}}, Unusable.REFUSED, "model: hybrid layers"),
        ({"precision": "nvfp4"}, Unusable.REFUSED, "precision: nvfp4 is not modelled"),
        ({"parallel": {"pp_schedule": "v-half"}}, Unusable.REFUSED, "parallel.pp_schedule: v-half"),
        ({"parallel": {"pp_schedule": "interleaved 1f1b"}}, Unusable.SKIPPED, "parallel.vpp is missing"),
        ({"hardware": {"gpu": "TPU-v5"}}, Unusable.SKIPPED, "hardware: no cluster preset is a TPU-v5"),
        ({"hardware": {"gpu": "H100-PCIe"}}, Unusable.SKIPPED, "hardware: no cluster preset is a H100-PCIe"),
        ({"micro_batch": "two"}, Unusable.REFUSED, "rows: 1: micro_batch: is text ('two')"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why(changes, why, reason):
    found = published(**changes)
    assert isinstance(found, UnusableRun)
    assert (found.why, found.reason[: len(reason)]) == (why, reason)


def test_layers_follow_from_the_parameters():
    """32 layers of 4 x 4096^2 + 3 x 4096 x 11008 and two tables of 32000 x 4096 are 6.74e9."""
    run = published(model=DENSE | {"layers": None, "params_label": "6.74B"})
    assert run.model.num_layers == 32
    assert "layers: not stated, 32 have 6.74B parameters" in run.assumed


def test_heads_that_nobody_states_are_about_128_wide():
    """5120 = 40 x 128, and 40 is a multiple of eight."""
    run = published(model=DENSE | {"hidden": 5120, "heads": None})
    assert run.model.attention.num_heads == 40
    assert "heads: not stated, 40 of 128" in run.assumed


def test_a_sliding_window_in_words():
    """Every other layer sees 128 keys, beginning with the first."""
    run = published(model=DENSE | {"notes": "sliding-window 128 on every other layer; attention sinks"})
    windows = [run.model.kinds[kind].mixer.window for kind in run.model.layers]
    assert windows[:4] == [128, 0, 128, 0]
    assert all(run.model.kinds[kind].mixer.sink for kind in run.model.layers)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("none", "none"),
        ("full (uniform)", "full"),
        ("full (configs set use_checkpoint true)", "full"),
        ("selective: layernorm, moe_act", "selective:moe_act+layernorm"),
        ("selective: moe_act, layernorm, moe", "selective:layernorm+moe"),
        ("selective: RMSNorm, mla_up_proj", "selective:layernorm+mla_up_proj"),
        ("selective: mlp; Table 17 adds moe_act", "selective:mlp"),
        ("selective (config default)", "selective:core_attn"),
    ],
)
def test_words_for_recomputation(words, meant):
    assert f"recompute={meant}," in published(recompute=words).plan


def test_modules_of_recomputation_are_those_of_a_plan():
    assert set(published_plan.RECOMPUTE_MODULES) == set(RECOMPUTE_MODULES)


@pytest.mark.parametrize(
    ("axes", "meant"),
    [
        ({"zero": 0}, "none"),
        ({"zero": 2}, "zero1"),
        ({"zero": 2, "pp": 1}, "zero2"),
        ({"zero": 3, "fsdp": 64}, "zero3"),
        ({"zero": "optim_grads_params (Megatron-FSDP)"}, "zero3"),
        ({"zero": None, "fsdp": "fully_shard (FSDP2)"}, "zero3"),
        ({"zero": "optim_grads", "pp": 1}, "zero2"),
        ({"zero": "optim"}, "zero1"),
    ],
)
def test_words_for_sharding(axes, meant):
    assert f"sharding={meant}," in published(parallel=axes).plan


@pytest.mark.parametrize(
    ("axes", "meant"),
    [
        ({"vpp": 2}, "vpp=2,"),
        ({"vpp": 2}, "schedule=interleaved"),
        ({"pp_schedule": "1f1b-interleaved-vpp2"}, "vpp=2,"),
        ({"pp_schedule": "ZB-1p"}, "schedule=zb_h1"),
        ({"pp_schedule": "DualPipe", "vpp": 2}, "schedule=dualpipe"),
        ({"pp": 1, "vpp": 4}, "vpp=1,"),
    ],
)
def test_words_for_schedules(axes, meant):
    assert meant in published(parallel=axes).plan


@pytest.mark.parametrize(
    ("layers", "layout", "assumed"),
    [
        (30, "7+8x2+7", ("stage_layers: not stated, embedding and head counted as layers",)),
        (31, "7+8x2+8", ("stage_layers: not stated, embedding counted as layers",)),
        (32, "", ()),
        (29, "", ()),
    ],
)
def test_uneven_stages_count_embedding_and_head(layers, layout, assumed):
    """Four stages: 30 + 2 and 31 + 1 divide, 29 + 0, 1, 2 do not."""
    run = published(model=DENSE | {"layers": layers})
    assert run.plan.partition("stage_layers=")[2] == layout
    assert run.assumed == assumed


def test_a_layout_in_words_is_taken():
    layout = "Et*7|(t*8|)*2t*9L"
    assert published(overlap={"pp_layout": layout}).plan.endswith(f"stage_layers={layout}")
    assert published(notes=f"the layout {layout} was used").plan.endswith(f"stage_layers={layout}")


def test_what_is_not_modelled_is_named():
    run = published(overlap={"cpu_offloading_num_layers": 20, "compile": True}, extra="x")
    assert run.switches.offloaded_layers == 20
    assert set(run.assumed) == {
        "not modelled: overlap.compile",
        "not modelled: extra=x",
    }


def test_switches_of_the_software():
    said = published(overlap={"moe_a2a": True, "tp_comm": False, "cuda_graph_scope": ["attn", "moe_router"]}).switches
    assert (said.ep_overlap, said.tp_overlap, said.pp_overlap) == (True, False, None)
    assert said.cuda_graphs is CudaGraphs.LAYER
    assert published(overlap={"cuda_graph": "none"}).switches.cuda_graphs is CudaGraphs.NONE
    full = {"cuda_graph": "local", "cuda_graph_scope": "full_iteration"}
    assert published(overlap=full).switches.cuda_graphs is CudaGraphs.FULL
    assert published().switches.cuda_graphs is None


@pytest.mark.parametrize(
    ("routing", "factor", "field"),
    [
        ("force-balanced, dropless", None, None),
        ("token-drop CF=1", 1.0, None),
        ("natural, capacity factor 1.5 (drop)", 1.5, "load"),
        ("token-drop (capacity factor not stated)", 1.0, "capacity_factor"),
    ],
)
def test_words_for_routing(routing, factor, field):
    run = published(model=MOE, parallel={"ep": 4, "etp": 1, "dispatcher": "alltoall"}, routing=routing)
    assert run.capacity_factor == factor
    assert fields(run) == ({field} if field else set())


@pytest.mark.parametrize(
    ("kind", "unit", "expected"),
    [
        ("max over ranks of torch max_memory_allocated", "GiB", (MemoryKind.ALLOCATED, MemoryStage.MAX)),
        ("torch peak allocated on the LAST rank", "GiB", (MemoryKind.ALLOCATED, MemoryStage.LAST)),
        ("max allocated; the rows behave like the first stage", "GiB", (MemoryKind.ALLOCATED, MemoryStage.FIRST)),
        ("torchtitan memory metric (max reserved over ranks)", "GiB", (MemoryKind.RESERVED, MemoryStage.MAX)),
        ("max over first/last nodes", "GB (nvidia-smi)", (MemoryKind.NVIDIA_SMI, MemoryStage.ENDS)),
    ],
)
def test_words_for_memory(kind, unit, expected):
    (reading,) = published(measured={"peak_mem_gb": 40.0, "mem_kind": kind, "mem_unit": unit}).measured.memory
    assert (reading.kind, reading.stage) == expected
    assert reading.peak_bytes == 40 * GIB


def test_memory_by_rank_becomes_memory_by_stage():
    """Eight ranks on two stages of four: each stage keeps its fullest rank."""
    ranks = {str(rank): 100.0 + rank for rank in range(8)}
    run = published(
        hardware={"count": 8},
        parallel={"tp": 1, "pp": 2},
        measured={"peak_mem_gb": 1.0, "peak_reserved_gb": 2.0, "peak_alloc_by_rank_mib": ranks},
    )
    first, second = run.measured.memory
    assert first.stage_bytes == (103 * MIB, 107 * MIB)
    assert (first.stage, first.peak_bytes) == (MemoryStage.LIST, 107 * MIB)
    assert (second.kind, second.peak_bytes) == (MemoryKind.RESERVED, 2 * GIB)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("causal-halved, no recompute", FlopsRule.CAUSAL_HALVED),
        ("full attention, no recompute", FlopsRule.FULL_ATTENTION),
        ("hardware: recompute counted", FlopsRule.HARDWARE),
        ("not stated", FlopsRule.CAUSAL_HALVED),
    ],
)
def test_words_for_flops(words, rule):
    run = published(measured={"step_time_s": None, "tflops_per_gpu": 400.0, "flops_rule": words})
    assert run.measured.flops_rule is rule
    assert run.measured.flops_per_s_per_device == 4e14
    assert any(line.startswith("time: from TFLOP/s") for line in run.assumed)


def test_a_run_out_of_memory_needs_no_batch():
    """One micro-batch per stage and replica fills the pipeline: 1 x 8 x 4."""
    run = published(global_batch=None, measured={"step_time_s": None, "oom": True})
    assert run.measured.oom
    assert not run.measured.has_time
    assert run.global_batch == 32


@pytest.mark.parametrize(
    ("device", "memory_gb", "name"),
    [
        ("A100-SXM-80GB", None, "a100-80-sxm"),
        ("A100-SXM-40GB", None, "a100-40-sxm"),
        ("A100-SXM", 40, "a100-40-sxm"),
        ("GB200-NVL72", None, "gb200-nvl72"),
        ("B200-SXM", 178, "b200-sxm"),
        ("H20-SXM-96GB", None, "h20-sxm"),
        ("H200-SXM-141GB", 141, "h200-sxm"),
        ("Ascend-910B3", None, "ascend-910b3"),
        ("Ascend-910B", 64, "ascend-910b"),
        ("MI355X-288GB", 288, "mi355x"),
    ],
)
def test_devices_are_recognised(device, memory_gb, name):
    machine, assumed = machine_for(Hardware(device=device, memory_gb=memory_gb))
    assert (machine.name, assumed) == (name, ())


def test_what_a_record_says_of_its_hardware_counts():
    plain, assumed = machine_for(Hardware(device="A100-class"))
    assert (plain.name, len(assumed)) == ("a100-80-sxm", 1)
    bigger, _ = machine_for(Hardware(device="H100-SXM-96GB", memory_gb=96))
    assert bigger.device_memory_bytes == 96 * GIB
    small, _ = machine_for(Hardware(device="H100-SXM-80GB", devices_per_domain=4))
    assert (small.devices_per_domain, small.scale_up.size) == (4, 4)
    with pytest.raises(UnusableError):
        machine_for(Hardware(device="V100-SXM3-32GB (DGX-2)"))


@pytest.mark.parametrize(
    ("words", "gbit"),
    [
        ("NVLink3 in node; 4x OmniPath 100 Gb/s per node", 50),
        ("NVLink3 in node; 800 Gb/s per node inter-node", 100),
        ("NVLink in node; 1600 Gbps RoCE node-node", 200),
        ("NVLink3 in node; 8x HDR200 InfiniBand per node", 200),
        ("NVLink4; InfiniBand 400 Gb/s per GPU", 400),
        ("NVLink4; InfiniBand 8x50 GB/s per node", 400),
        ("NVLink4 in node; fabric not stated", 200),
    ],
)
def test_a_network_in_words(words, gbit):
    """An A100's preset has 200 Gbit/s; a node has eight devices."""
    machine, assumed = machine_for(Hardware(device="A100-SXM-80GB", interconnect=words))
    assert machine.network.bytes_per_s == pytest.approx(gbit * 1e9 / 8)
    assert bool(assumed) == (gbit != 200)


def test_links_in_a_node_count_both_directions():
    """400 GB/s of an A800 are 200 each way; an H100's 450 are its preset's."""
    slower, _ = machine_for(Hardware(device="A800-SXM-80GB", interconnect="NVLink 400 GB/s; RoCE"))
    assert slower.scale_up.bytes_per_s == pytest.approx(200e9)
    same, _ = machine_for(Hardware(device="H100-SXM-80GB", interconnect="NVLink4 450 GB/s in node"))
    assert same.scale_up.bytes_per_s == pytest.approx(450e9)
