"""Plans as text: defaults, derived sizes, names, every fault with its path."""

import pytest

from ap_search.errors import SpecError
from ap_search.plan.layout import balanced_layout, even_layout, layout_of, padded_layout
from ap_search.plan.plan import Dispatcher, Layout, Plan, Recompute, Schedule, Sharding
from ap_search.plan.text import (
    AXES,
    DISPATCHER_VALUES,
    RECOMPUTE_MODULES,
    SCHEDULE_VALUES,
    SETTABLE,
    SHARDING_VALUES,
    dispatcher_text,
    knob_text,
    parse_dispatcher,
    parse_knob_values,
    parse_plan,
    parse_recompute,
    parse_schedule,
    parse_sharding,
    plan_name,
    recompute_text,
    schedule_text,
    sharding_text,
)
from ap_search.spec.blocks import Attention, DenseFfn, LayerKind, Model, MoeFfn

ATTENTION = Attention(num_heads=4, num_kv_heads=4, qk_head_dim=16, v_head_dim=16)
DENSE = LayerKind(mixer=ATTENTION, ffn=DenseFfn(width=64))
MOE = LayerKind(mixer=ATTENTION, ffn=MoeFfn(num_experts=8, top_k=2, expert_width=32))


def make_model(layers: tuple[int, ...], mtp_layers: int) -> Model:
    return Model(
        name="m",
        hidden_size=64,
        vocab_size=128,
        tied_embeddings=False,
        kinds=(DENSE, MOE),
        layers=layers,
        mtp_layers=mtp_layers,
    )


MODEL = make_model((0, 0, 0) + (1,) * 58, mtp_layers=1)
MODEL_64 = make_model((1,) * 64, mtp_layers=0)


def balance(pp: int, vpp: int) -> Layout:
    return balanced_layout(weights=[1.0] * 61, first_extra=0.0, last_extra=2.0, pp=pp, vpp=vpp)


def read(text: str, *, devices: int = 256, global_batch: int = 1024) -> Plan:
    return parse_plan(text, devices=devices, global_batch=global_batch, default_layout=balance, model=MODEL)


def faults_of(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        read(text)
    return [str(fault) for fault in caught.value.faults]


def test_what_is_left_out_follows() -> None:
    """256 devices: dp = 256/(2*4) = 32, edp = 32*2/8 = 8, micro-batches 1024/32 = 32; 61 layers on 4 are uneven."""
    assert read("tp=2,pp=4,ep=8") == Plan(
        tp=2,
        pp=4,
        dp=32,
        ep=8,
        edp=8,
        num_microbatches=32,
        sequence_parallel=True,
        sharding=Sharding.ZERO1,
        recompute=Recompute.NONE,
        dispatcher=Dispatcher.ALLTOALL,
        schedule=Schedule.ONE_F_ONE_B,
        layout=balance(4, 1),
    )


def test_everything_can_be_given() -> None:
    """edp = 4*2*2/(4*2) = 2, micro-batches 1024/(2*4) = 128."""
    plan = read(
        "tp=2, cp=2, pp=4, vpp=2, dp=4, ep=4, etp=2, mbs=2, sharding=zero3, recompute=selective:layernorm+moe_act,"
        "dispatcher=deepep, schedule=dualpipe, sp=0, stage_layers=7x7+12"
    )
    assert plan == Plan(
        tp=2,
        cp=2,
        pp=4,
        vpp=2,
        dp=4,
        ep=4,
        etp=2,
        edp=2,
        mbs=2,
        num_microbatches=128,
        sequence_parallel=False,
        sharding=Sharding.ZERO3,
        recompute=Recompute.MOE_ACT | Recompute.LAYERNORM,
        dispatcher=Dispatcher.DEEPEP,
        schedule=Schedule.DUALPIPE,
        layout=layout_of((7,) * 7 + (12,), pp=4, vpp=2),
    )


def test_interleaving_is_the_schedule_of_virtual_stages() -> None:
    assert read("pp=4,vpp=2").schedule == Schedule.INTERLEAVED
    assert read("pp=4,vpp=2,schedule=1f1b").schedule == Schedule.ONE_F_ONE_B


def test_sequence_parallelism_follows_tensor_parallelism() -> None:
    assert not read("tp=1,sp=1").sequence_parallel  # nothing to be parallel over
    assert read("tp=2,sp=1").sequence_parallel
    assert not read("tp=2,sp=0").sequence_parallel


def test_what_does_not_divide_is_left_to_the_rules() -> None:
    """24 devices, tp 5: dp = 24 // 5 = 4; edp = 4*5 // 16 = 1; batch 3: 3 // 4 = 0, so one micro-batch."""
    plan = read("tp=5,ep=16", devices=24, global_batch=3)
    assert (plan.dp, plan.edp, plan.num_microbatches) == (4, 1, 1)
    assert read("tp=512", devices=24).dp == 1
    assert read("dp=7", devices=24).dp == 7


def test_more_stages_than_layers_can_be_priced() -> None:
    """61 layers on 16*4 = 64 virtual stages: one each, then 3 empty ones."""
    assert read("pp=16,vpp=4").layout == padded_layout(61, 16, 4)
    assert read("pp=16,vpp=4").layout.chunk_layers[-3:] == (0, 0, 0)


def test_megatron_layout_strings_are_taken() -> None:
    assert read("pp=16,stage_layers=Et*4|(t*4|)*14tmL").layout == layout_of((4,) * 15 + (1,), pp=16, vpp=1)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("tp=1", "tp1-pp1-dp256-mbs1-zero1"),
        ("tp=2,pp=61,dp=2,ep=4", "tp2-pp61-dp2-ep4-mbs1-zero1-alltoall"),
        ("tp=2,pp=4,ep=8", "tp2-pp4-dp32-ep8-mbs1-zero1-alltoall-L15+16x2+14"),
        ("cp=2,etp=2,tp=2,mbs=4,sharding=none,sp=0", "tp2-cp2-pp1-dp64-etp2-mbs4-none-alltoall-nosp"),
        ("recompute=full", "tp1-pp1-dp256-mbs1-zero1-full"),
        ("recompute=selective:layernorm+core_attn", "tp1-pp1-dp256-mbs1-zero1-sel:core_attn+layernorm"),
        ("ep=8,dispatcher=deepep,sharding=hsdp", "tp1-pp1-dp256-ep8-mbs1-hsdp-deepep"),
        ("pp=16,stage_layers=4x15+1", "tp1-pp16-dp16-mbs1-zero1-L4x15+1"),
        ("pp=16,stage_layers=4x15+1,schedule=zb_h1", "tp1-pp16-dp16-mbs1-zero1-zb_h1-L4x15+1"),
        ("pp=61,vpp=1,schedule=gpipe", "tp1-pp61-dp4-mbs1-zero1-gpipe"),
        ("pp=16,vpp=4", "tp1-pp16-vpp4-dp16-mbs1-zero1-L1x61+0x3"),
    ],
)
def test_names_hold_what_differs(text: str, name: str) -> None:
    plan = read(text)
    assert plan_name(plan) == name
    assert read(name) == plan


def test_the_interleaved_name_of_the_guide() -> None:
    """64 layers on 8*2 divide; dp = 256/(2*8) = 16."""
    plan = parse_plan(
        "tp=2,pp=8,vpp=2,ep=8",
        devices=256,
        global_batch=256,
        default_layout=lambda pp, vpp: even_layout(64, pp, vpp),
        model=MODEL_64,
    )
    assert plan_name(plan) == "tp2-pp8-vpp2-dp16-ep8-mbs1-zero1-alltoall"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "--plan: '' is no part of a plan's short name"),
        ("hello", "--plan: 'hello' is no part"),
        ("tp=2,zz=3", "--plan: unknown axis 'zz' (legal: tp cp pp"),
        ("tp=2,vp=3", "--plan: unknown axis 'vp', nearest is 'vpp' (legal: tp cp pp"),
        ("shard=zero1", "--plan: unknown axis 'shard', nearest is 'sharding'"),
        ("edp=2", "--plan: edp follows from the other axes and cannot be given"),
        ("tp=2,pp", "--plan: 'pp' is no axis=value"),
        ("tp=2,", "--plan: '' is no axis=value"),
        ("tp=2,tp=4", "--plan tp: is given twice"),
        ("tp2-pp4-tp2", "--plan tp: is given twice"),
        ("zero1-zero2", "--plan sharding: is given twice"),
        ("tp=0", "--plan tp: '0' is no positive integer (legal: 1 to 1000000)"),
        ("tp=-2", "--plan tp: '-2' is no positive integer"),
        ("tp=2.0", "--plan tp: '2.0' is no positive integer"),
        ("tp=", "--plan tp: '' is no positive integer"),
        ("tp=two", "--plan tp: 'two' is no positive integer"),
        ("tp=²", "--plan tp: '²' is no positive integer"),
        ("tp=1000001", "--plan tp: '1000001' is too large"),
        ("tp=" + "9" * 10_000, "--plan tp: '9999"),
        ("tp0-pp1-dp8", "--plan tp: '0' is no positive integer"),
        ("tp2-pp4-deepp", "--plan: 'deepp' is no part of a plan's short name, nearest is 'deepep'"),
        ("sharding=zero4", "--plan sharding: unknown value 'zero4', nearest is 'zero"),
        ("dispatcher=a2a", "--plan dispatcher: unknown value 'a2a'"),
        ("schedule=1F1B", "--plan schedule: unknown value '1F1B'"),
        ("recompute=yes", "--plan recompute: unknown value 'yes' (legal: none full selective:a+b"),
        ("recompute=selective:moe_atc", "--plan recompute: unknown module 'moe_atc', nearest is 'moe_act'"),
        ("recompute=selective:", "--plan recompute: unknown module ''"),
        ("sp=yes", "--plan sp: unknown value 'yes' (legal: 0 1)"),
        ("pp=2,stage_layers=30+30", "--plan stage_layers: sums to 60 layers"),
        ("pp=1000000,vpp=1000000", "--plan pp: pp*vpp = 1000000000000 (legal: at most 100000)"),
    ],
)
def test_faults_name_the_place_the_reason_and_what_is_legal(text: str, fault: str) -> None:
    found = faults_of(text)
    assert len(found) == 1
    assert found[0].startswith(fault)
    assert len(found[0]) < 250


def test_all_faults_come_at_once() -> None:
    assert [fault.split(":")[0] for fault in faults_of("tp=0,foo=1,sharding=x,pp=2,stage_layers=1+1,ep=2,ep=3")] == [
        "--plan",
        "--plan ep",
        "--plan tp",
        "--plan sharding",
        "--plan stage_layers",
    ]


def test_a_layout_is_not_judged_by_stages_that_cannot_be_read() -> None:
    assert [fault.split(":")[0] for fault in faults_of("pp=x,stage_layers=4x15+1")] == ["--plan pp"]


def test_knob_words_come_back() -> None:
    assert [sharding_text(parse_sharding(word)) for word in SHARDING_VALUES] == list(SHARDING_VALUES)
    assert [dispatcher_text(parse_dispatcher(word)) for word in DISPATCHER_VALUES] == list(DISPATCHER_VALUES)
    assert [schedule_text(parse_schedule(word)) for word in SCHEDULE_VALUES] == list(SCHEDULE_VALUES)
    assert (len(SHARDING_VALUES), len(DISPATCHER_VALUES), len(SCHEDULE_VALUES)) == (
        len(Sharding),
        len(Dispatcher),
        len(Schedule),
    )
    assert parse_sharding("hsdp") == Sharding.HSDP
    assert parse_dispatcher("deepep") == Dispatcher.DEEPEP
    assert parse_schedule("zb_h1") == Schedule.ZB_H1


def test_recompute_words_come_back_in_a_fixed_order() -> None:
    everything = parse_recompute("selective:" + "+".join(reversed(RECOMPUTE_MODULES)))
    assert recompute_text(everything) == "selective:" + "+".join(RECOMPUTE_MODULES)
    assert [recompute_text(parse_recompute(word)) for word in ("none", "full")] == ["none", "full"]
    for module in RECOMPUTE_MODULES:
        assert parse_recompute(f"selective:{module}") == Recompute[module.upper()]


def test_candidates_are_read_in_order_and_once() -> None:
    assert parse_knob_values("ep", "16, 8,8") == (16, 8)
    assert parse_knob_values("sharding", "zero3,none") == (Sharding.ZERO3, Sharding.NONE)
    assert parse_knob_values("recompute", "none,selective:moe_act+layernorm,full") == (
        Recompute.NONE,
        Recompute.MOE_ACT | Recompute.LAYERNORM,
        Recompute.FULL,
    )


@pytest.mark.parametrize("axis", SETTABLE)
def test_every_settable_axis_is_written_as_it_is_read(axis: str) -> None:
    word = "7" if axis in AXES else knob_text(axis, 1)
    (value,) = parse_knob_values(axis, word)
    assert knob_text(axis, value) == word


@pytest.mark.parametrize(
    ("axis", "text", "faults"),
    [
        ("ep", "", ["--set ep: '' is no positive integer (legal: 1 to 1000000)"]),
        (
            "ep",
            "8,x,0",
            [
                "--set ep: 'x' is no positive integer (legal: 1 to 1000000)",
                "--set ep: '0' is no positive integer (legal: 1 to 1000000)",
            ],
        ),
        ("edp", "2", [f"--set: edp follows from the other axes and cannot be given (legal: {' '.join(SETTABLE)})"]),
        ("stage_layers", "2", [f"--set: unknown axis 'stage_layers' (legal: {' '.join(SETTABLE)})"]),
        (
            "dispatch",
            "deepep",
            [f"--set: unknown axis 'dispatch', nearest is 'dispatcher' (legal: {' '.join(SETTABLE)})"],
        ),
        (
            "sharding",
            "zero9",
            ["--set sharding: unknown value 'zero9', nearest is 'zero3' (legal: none zero1 zero2 zero3 hsdp)"],
        ),
    ],
)
def test_bad_candidates_are_refused(axis: str, text: str, faults: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_knob_values(axis, text)
    assert [str(fault) for fault in caught.value.faults] == faults
