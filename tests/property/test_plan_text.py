"""Laws of plan text: a name comes back as its plan, and no text does worse than a fault."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ap_search.errors import SpecError
from ap_search.plan.layout import balanced_layout, layout_of, padded_layout
from ap_search.plan.plan import Dispatcher, Layout, Plan, Recompute, Schedule, Sharding
from ap_search.plan.text import RECOMPUTE_MODULES, parse_plan, plan_name
from ap_search.spec.blocks import DenseFfn, LayerKind, Model

MODEL = Model(
    name="m",
    hidden_size=64,
    vocab_size=128,
    tied_embeddings=False,
    kinds=(LayerKind(mixer=None, ffn=DenseFfn(width=64)),),
    layers=(0,) * 61,
    mtp_layers=1,
)


def balance(pp: int, vpp: int) -> Layout:
    return balanced_layout(weights=[1.0] * 61, first_extra=0.0, last_extra=2.0, pp=pp, vpp=vpp)


def read(text: str) -> Plan:
    return parse_plan(text, devices=256, global_batch=1024, default_layout=balance, model=MODEL)


degrees = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw any plan whose edp and micro-batches follow from the rest, at 256 devices and a batch of 1024."""
    tp, cp, dp, ep, etp, mbs = (draw(degrees) for _ in range(6))
    pp, vpp = draw(st.sampled_from([1, 2, 4, 61, 80])), draw(st.sampled_from([1, 2]))
    default = padded_layout(61, pp, vpp) if pp * vpp > 61 else balance(pp, vpp)
    split = draw(st.integers(0, 61))
    chunks = (split, *(0,) * (pp * vpp - 2), 61 - split) if pp * vpp > 1 else (61,)
    modules = draw(st.sets(st.integers(0, len(RECOMPUTE_MODULES) - 1)))
    return Plan(
        **{"tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "dp": dp, "ep": ep, "etp": etp, "mbs": mbs},
        edp=max(1, dp * cp * tp // (ep * etp)),
        num_microbatches=max(1, 1024 // (mbs * dp)),
        sequence_parallel=tp > 1 and draw(st.booleans()),
        sharding=draw(st.sampled_from(Sharding)),
        recompute=draw(st.sampled_from([Recompute.FULL, Recompute(sum(1 << bit for bit in modules))])),
        dispatcher=draw(st.sampled_from(Dispatcher)),
        schedule=draw(st.sampled_from(Schedule)),
        layout=draw(st.sampled_from([default, layout_of(chunks, pp=pp, vpp=vpp)])),
    )


@settings(max_examples=100, deadline=None)
@given(plan=plans())
def test_a_name_comes_back_as_the_same_plan(plan: Plan) -> None:
    assert read(plan_name(plan)) == plan


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40) | st.text(alphabet="tpcdvem=,-0123456789L+x|:", max_size=40))
def test_no_text_does_worse_than_a_spec_error(text: str) -> None:
    try:
        assert isinstance(read(text), Plan)
    except SpecError as error:
        assert all("\n" not in str(fault) and str(fault).startswith("--plan") for fault in error.faults)
