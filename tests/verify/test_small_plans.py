"""Random small plans of random small models: results equal one process's, bytes the prediction."""

from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from ap_search.errors import SpecError
from ap_search.runtime.launch import launch
from ap_search.runtime.settings import RunSettings
from ap_search.runtime.support import check_supported
from ap_search.runtime.verify import VerifyJob
from ap_search.setting import load_execution
from ap_search.spec.blocks import Attention, DenseFfn, LayerKind, Model, MoeFfn, QkNorm
from tests.verify import ranks

DEVICES = 4
SEQ_LEN = 8
PLANS_PER_RUN = 4


@dataclass(frozen=True)
class Case:
    """A model in a few numbers, and a plan for four devices that breaks no rule and that the runtime supports."""

    heads: int
    key_heads: int
    experts: int
    top_k: int
    widths: tuple[int, int, int]
    gated: bool
    score_function: str
    extras: frozenset[str]
    layers: tuple[int, ...]
    plan: str
    seed: int

    @property
    def model(self) -> Model:
        """Dense, or with experts in some layers; what the memory model counts exactly."""
        dense, expert, shared = self.widths
        norm = QkNorm.HEAD if "qk_norm" in self.extras else QkNorm.NONE
        mixer = Attention(num_heads=self.heads, num_kv_heads=self.key_heads, qk_head_dim=8, v_head_dim=8, qk_norm=norm)
        moe = MoeFfn(
            num_experts=self.experts,
            top_k=self.top_k,
            expert_width=expert,
            gated=self.gated,
            shared_width=shared,
            score_function=self.score_function,
            score_bias="score_bias" in self.extras,
            shared_gate="shared_gate" in self.extras and shared > 0,
            latent_width=16 if "latent" in self.extras else 0,
        )
        plain = LayerKind(mixer=mixer, ffn=DenseFfn(width=dense, gated=not self.gated))
        kinds = (plain, LayerKind(mixer=mixer, ffn=moe)) if 1 in self.layers else (plain,)
        return Model(
            name="drawn", hidden_size=32, vocab_size=96, tied_embeddings=False, kinds=kinds, layers=self.layers
        )

    @property
    def job(self) -> VerifyJob:
        """What the ranks are given."""
        run = RunSettings(seq_len=SEQ_LEN, seed=self.seed, dtype="float64")
        setting, asked = load_execution(
            model=self.model,
            devices=DEVICES,
            plan=self.plan,
            global_batch=None,
            replicas=run.hsdp_replicas,
            seq_len=SEQ_LEN,
            capacity_factor=None,
            pad_to_capacity=False,
        )
        check_supported(self.model, asked, run)
        return VerifyJob(context=setting.cost, plan=asked, settings=run, steps=1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Models and plans; what a rule or the runtime refuses is drawn again."""
    heads = draw(st.sampled_from([2, 4, 8]))
    layers = tuple(draw(st.lists(st.sampled_from([0, 1]), min_size=2, max_size=4)))
    layers = (0, *layers) if 0 not in layers else layers
    tp, pp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]))
    parts = {"tp": tp, "pp": pp, "mbs": draw(st.integers(1, 2))}
    knobs = {"sharding": draw(st.sampled_from(["none", "zero1", "zero2", "zero3"]))}
    knobs["recompute"] = draw(st.sampled_from(["none", "none", "full"]))
    if 1 in layers:
        parts["ep"], parts["etp"] = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (1, 2)]))
        knobs["dispatcher"] = draw(st.sampled_from(["alltoall", "allgather", "deepep"]))
    if pp > 1:
        knobs["schedule"] = draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))
        parts["vpp"] = 2 if knobs["schedule"] == "interleaved" else 1
    case = Case(
        heads=heads,
        key_heads=draw(st.sampled_from([2, heads])),
        experts=draw(st.sampled_from([4, 8])),
        top_k=draw(st.integers(1, 3)),
        widths=(draw(st.sampled_from([16, 40])), draw(st.sampled_from([8, 12])), draw(st.sampled_from([0, 16]))),
        gated=draw(st.booleans()),
        score_function=draw(st.sampled_from(["softmax", "sigmoid"])),
        extras=frozenset(draw(st.sets(st.sampled_from(["qk_norm", "score_bias", "shared_gate", "latent"])))),
        layers=layers,
        plan=",".join(f"{name}={value}" for name, value in (parts | knobs).items()),
        seed=draw(st.integers(0, 99)),
    )
    try:
        assert case.job
    except SpecError:
        assume(False)
    return case


@settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # what differs is named by plan and check: shrinking would only run for minutes
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(drawn=st.lists(cases(), min_size=PLANS_PER_RUN, max_size=PLANS_PER_RUN))
def test_small_plans_are_what_they_are_predicted_to_be(drawn: list[Case]) -> None:
    """One group of processes runs several plans one after the other; nothing may differ, float64 to 1e-9."""
    jobs = [case.job for case in drawn]
    faults = launch(ranks.verifying, jobs, devices=DEVICES, timeout_s=120, progress=lambda what, share: None)
    assert faults == ""
