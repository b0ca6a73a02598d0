"""Laws of layouts: balancing equals brute force, text comes back, every layer is counted once."""

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ap_search.plan.layout import (
    balanced_layout,
    block_counts,
    layout_of,
    layout_text,
    parse_layout,
    parse_megatron_layout,
)
from ap_search.plan.plan import Layout
from ap_search.spec.blocks import Attention, DenseFfn, LayerKind, Model, MoeFfn

ATTENTION = Attention(num_heads=4, num_kv_heads=4, qk_head_dim=16, v_head_dim=16)
DENSE = LayerKind(mixer=ATTENTION, ffn=DenseFfn(width=64))
MOE = LayerKind(mixer=ATTENTION, ffn=MoeFfn(num_experts=8, top_k=2, expert_width=32))


def make_model(layers: tuple[int, ...], mtp_layers: int = 0) -> Model:
    return Model(
        name="m",
        hidden_size=64,
        vocab_size=128,
        tied_embeddings=False,
        kinds=(DENSE, MOE),
        layers=layers,
        mtp_layers=mtp_layers,
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw any layout, empty stages included."""
    pp, vpp = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    chunks = draw(st.lists(st.integers(0, 4), min_size=pp * vpp, max_size=pp * vpp).filter(any))
    return layout_of(chunks, pp=pp, vpp=vpp)


def stage_loads(counts: tuple[int, ...], weights: list[int], first_extra: int, last_extra: int) -> list[int]:
    ends = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    loads = [sum(weights[low:high]) for low, high in pairwise(ends)]
    loads[0] += first_extra
    loads[-1] += last_extra
    return loads


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    first_extra=st.integers(0, 8),
    last_extra=st.integers(0, 8),
    data=st.data(),
)
def test_balanced_layout_equals_brute_force(
    weights: list[int], first_extra: int, last_extra: int, data: st.DataObject
) -> None:
    pp = data.draw(st.integers(1, len(weights)))
    vpp = data.draw(st.integers(1, len(weights) // pp))
    cuts = [(0, *cut, len(weights)) for cut in combinations(range(1, len(weights)), pp * vpp - 1)]
    splits = [tuple(high - low for low, high in pairwise(cut)) for cut in cuts]

    def cost(counts: tuple[int, ...]) -> tuple[int, int]:
        loads = stage_loads(counts, weights, first_extra, last_extra)
        return max(loads), sum(load**2 for load in loads)

    layout = balanced_layout(weights=weights, first_extra=first_extra, last_extra=last_extra, pp=pp, vpp=vpp)
    assert cost(layout.chunk_layers) == min(map(cost, splits))
    assert min(layout.chunk_layers) >= 1


@settings(max_examples=100, deadline=None)
@given(layout=layouts())
def test_layout_text_comes_back(layout: Layout) -> None:
    text = layout_text(layout)
    assert parse_layout(text, num_layers=sum(layout.chunk_layers), pp=layout.pp, vpp=layout.vpp) == layout


@settings(max_examples=100, deadline=None)
@given(layout=layouts())
def test_megatron_string_gives_the_same_layout(layout: Layout) -> None:
    stages = ["t" * count for count in layout.chunk_layers]
    text = "E" + "|".join(stages) + "mL"
    num_layers = sum(layout.chunk_layers)
    assert parse_megatron_layout(text, num_layers=num_layers, mtp_layers=1, pp=layout.pp, vpp=layout.vpp) == layout


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), data=st.data())
def test_every_layer_is_counted_once_and_in_order(layout: Layout, data: st.DataObject) -> None:
    num_layers = sum(layout.chunk_layers)
    layers = data.draw(st.lists(st.integers(0, 1), min_size=num_layers, max_size=num_layers))
    counts = block_counts(make_model(tuple(layers), mtp_layers=1), layout).reshape(layout.pp * layout.vpp, -1)
    assert counts[:, :2].sum(axis=1).tolist() == list(layout.chunk_layers)
    assert counts.sum(axis=0).tolist() == [layers.count(0), layers.count(1), 1, 1, 1]
    start = 0
    for row, layers_here in zip(counts.tolist(), layout.chunk_layers, strict=True):
        assert row[1] == sum(layers[start : start + layers_here])
        start += layers_here
