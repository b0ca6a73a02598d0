"""Stage layouts: even, balanced, read from both syntaxes, and what stages then hold."""

import pytest

from ap_search.errors import SpecError
from ap_search.plan.layout import (
    balanced_layout,
    block_counts,
    even_layout,
    layout_of,
    layout_text,
    padded_layout,
    parse_layout,
    parse_megatron_layout,
    stage_counts,
)
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


def test_layers_that_divide_lie_evenly() -> None:
    """64 layers on 8 stages of 2 chunks: 64/16 = 4 each, 8 per stage."""
    layout = even_layout(64, 8, 2)
    assert layout is not None
    assert (layout.chunk_layers, layout.even, layout.stage_layers) == ((4,) * 16, True, (8,) * 8)


@pytest.mark.parametrize(("num_layers", "pp", "vpp"), [(61, 16, 1), (64, 8, 3), (4, 8, 1), (30, 4, 1), (80, 16, 2)])
def test_layers_that_do_not_divide_have_no_even_layout(num_layers: int, pp: int, vpp: int) -> None:
    """61 % 16 = 13, 64 % 24 = 16, 4 < 8, 30 % 4 = 2, 80 % 32 = 16."""
    assert even_layout(num_layers, pp, vpp) is None


def test_stage_layers_sum_the_chunks_of_a_stage() -> None:
    """Virtual stages 0..3 of pp 2: stage 0 has numbers 0 and 2 (1 + 3), stage 1 has 1 and 3 (2 + 4)."""
    assert layout_of((1, 2, 3, 4), pp=2, vpp=2).stage_layers == (4, 6)


def test_padded_layout_leaves_the_last_stages_empty() -> None:
    assert padded_layout(3, 4, 2) == layout_of((1, 1, 1, 0, 0, 0, 0, 0), pp=4, vpp=2)


@pytest.mark.parametrize(
    ("weights", "first_extra", "last_extra", "pp", "vpp", "text"),
    [
        pytest.param([1.0] * 61, 0.0, 3.0, 16, 1, "4x15+1", id="61 on 16: 15*4 and 1 + 3 are all 4"),
        pytest.param([1.0] * 61, 0.2, 1.5, 16, 1, "3+4x14+2", id="61 on 16: 3.2, 14*4, 3.5 beats 4.2, 14*4, 2.5"),
        pytest.param([1.0] * 8, 1.0, 1.0, 4, 1, "1+3x2+1", id="8 on 4: heaviest 3; squares 2*2+3*3+3*3+2*2 = 26"),
        pytest.param([1.0] * 5, 0.0, 0.0, 3, 1, "1+2x2", id="a tie of 1+2+2, 2+1+2, 2+2+1: few layers first"),
        pytest.param([1.0] * 6, 0.0, 0.0, 3, 1, "2x3", id="nothing to trade"),
        pytest.param([3.0, 1.0, 1.0, 1.0], 0.0, 0.0, 2, 1, "1+3", id="one heavy layer against three light ones"),
        pytest.param([1.0, 1.0, 1.0, 3.0], 0.0, 0.0, 2, 1, "3+1", id="the heavy layer last"),
        pytest.param([1.0] * 7, 0.0, 5.0, 2, 2, "2x3+1", id="virtual stages in order, the last one short"),
        pytest.param(
            [1.0, 5.0, 2.0, 3.0], 0.0, 0.0, 3, 1, "1x2+2", id="1 5 5 before 6 2 3, though its squares sum to more"
        ),
        pytest.param([1.0] * 3, 9.0, 9.0, 3, 1, "1x3", id="never an empty stage"),
        pytest.param([1.0] * 5, 1.0, 2.0, 1, 1, "5", id="one stage carries both extras"),
        pytest.param([0.0] * 4, 0.0, 0.0, 2, 1, "1+3", id="weightless layers are placed all the same"),
        pytest.param([0.1] * 10, 0.0, 0.0, 4, 1, "2x2+3x2", id="rounding of 0.1 does not upset ties"),
        pytest.param([4, 5, 5, 6, 6, 4, 0], 1.0, 6.0, 6, 1, "1x5+2", id="4+6 ties with 5+5, though 37ths are rounded"),
    ],
)
def test_balanced_layout_has_the_lightest_heaviest_stage(
    weights: list[float], first_extra: float, last_extra: float, pp: int, vpp: int, text: str
) -> None:
    layout = balanced_layout(weights=weights, first_extra=first_extra, last_extra=last_extra, pp=pp, vpp=vpp)
    assert layout_text(layout) == text
    assert sum(layout.chunk_layers) == len(weights)


@pytest.mark.parametrize(
    ("text", "pp", "vpp", "chunks"),
    [
        ("4x15+1", 16, 1, (4,) * 15 + (1,)),
        ("8x7+5", 8, 1, (8,) * 7 + (5,)),
        ("16x3+13", 4, 1, (16, 16, 16, 13)),
        ("15x3+16", 4, 1, (15, 15, 15, 16)),
        ("2x30+1+0", 8, 4, (2,) * 30 + (1, 0)),
        ("61", 1, 1, (61,)),
        ("0+61", 2, 1, (0, 61)),
        (" 60 + 1 ", 2, 1, (60, 1)),
        ("30+31x1", 2, 1, (30, 31)),
    ],
)
def test_counts_are_read(text: str, pp: int, vpp: int, chunks: tuple[int, ...]) -> None:
    """DeepSeek-V3's 61 layers, as Megatron-Bridge lays them: 4*15 + 1."""
    layout = parse_layout(text, num_layers=61, pp=pp, vpp=vpp)
    assert (layout.chunk_layers, layout.even) == (chunks, len(set(chunks)) == 1)


def test_counts_per_stage_are_shared_by_chunks() -> None:
    """Stages of 4 and 8 layers in 2 chunks: virtual stages 2 4 | 2 4."""
    assert parse_layout("4+8", num_layers=12, pp=2, vpp=2).chunk_layers == (2, 4, 2, 4)


def test_equal_counts_are_the_even_layout() -> None:
    assert parse_layout("2x4", num_layers=8, pp=4, vpp=1) == even_layout(8, 4, 1)
    assert parse_layout("4x2", num_layers=8, pp=2, vpp=2) == even_layout(8, 2, 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1+2+2+2", "sums to 7 layers"),
        ("1+2+2+3+0", "has 5 numbers for pp=4 vpp=1"),
        ("8", "has 1 numbers for pp=4"),
        ("2x999999", "has 999999 numbers"),
        ("2x9999999", "no count of layers"),
        ("", "'' is no count"),
        ("-1+3+3+3", "'-1' is no count"),
        ("1.5x4", "'1.5x4' is no count"),
        ("2x2x2", "no count"),
        ("٢x4", "no count"),
        ("a" * 1000, "no count"),
    ],
)
def test_bad_counts_are_refused_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_layout(text, num_layers=8, pp=4, vpp=1, path="--plan stage_layers")
    assert reason in str(caught.value)
    assert str(caught.value).startswith("--plan stage_layers: ")
    assert len(str(caught.value)) < 200


def test_a_stage_that_its_chunks_cannot_share_asks_for_every_virtual_stage() -> None:
    with pytest.raises(
        SpecError, match=r"5 layers of stage 1 .* vpp=2 chunks .*legal: 4 numbers in virtual-stage order"
    ):
        parse_layout("4+5", num_layers=9, pp=2, vpp=2)


@pytest.mark.parametrize(
    ("text", "num_layers", "mtp_layers", "pp", "vpp", "counts"),
    [
        ("Et*4|(t*4|)*14tmL", 61, 1, 16, 1, "4x15+1"),
        ("Et*2|(tt|)*5t|tmL", 14, 1, 4, 2, "2x6+1x2"),
        ("Et|(tt|)*30L", 61, 0, 8, 4, "1+2x30+0"),
        ("Et|(tt|)*30mL", 61, 1, 8, 4, "1+2x30+0"),
        ("E|t*3|(t|)*5mL", 8, 1, 8, 1, "0+3+1x5+0"),
        ("Ettt, | (t|)*2, L", 5, 0, 4, 1, "3+1x2+0"),
        ("E|*2ttL", 2, 0, 3, 1, "0x2+2"),
        ("Ett|ttL", 4, 0, 2, 1, "2x2"),
    ],
)
def test_megatron_layout_strings_are_read(
    text: str, num_layers: int, mtp_layers: int, pp: int, vpp: int, counts: str
) -> None:
    """First: 4 + 14*4 + 1 = 61; second: 2 + 5*2 + 1 + 1 = 14; third: 1 + 30*2 + 0 = 61 on 32 virtual stages."""
    layout = parse_layout(text, num_layers=num_layers, mtp_layers=mtp_layers, pp=pp, vpp=vpp)
    assert layout_text(layout) == counts
    assert (layout.pp, layout.vpp) == (pp, vpp)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tt|ttmL", "the embedding E must come once"),
        ("|EttttmL", "the embedding E must come once"),
        ("Ett|EttmL", "the embedding E must come once"),
        ("Etttt|mLL", "the head L must come once"),
        ("EttttmL|", "the head L must come once"),
        ("Ettttm|L", "MTP modules m are priced only beside the head"),
        ("Ettt|mtL", "MTP modules m are priced only beside the head"),
        ("Ettt|mL", "holds 3 decoder layers (legal: 4, as the model)"),
        ("Ett|ttL", "holds 0 MTP modules (legal: 1, as the model)"),
        ("Et|t|t|tmL", "has 4 virtual stages, but pp=2 vpp=1 has 2 (legal: vpp=2)"),
        ("Et|t|ttmL", "has 3 virtual stages, but pp=2 vpp=1 has 2 (legal: a multiple of pp=2)"),
        ("Ex|ttttmL", "cannot be read at 'x|ttttmL'"),
        ("E(tt|ttmL", "cannot be read at '(tt|ttmL'"),
        ("E((t)*2)*2|mL", "cannot be read at '((t)*2)*2|mL'"),
        ("Et*|tttmL", "cannot be read at '*|tttmL'"),
        ("E(t|)*999999mL", "holds too many layers and stages"),
        ("E(t*999999)*999999|mL", "holds too many layers and stages"),
    ],
)
def test_bad_megatron_layouts_are_refused_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_megatron_layout(text, num_layers=4, mtp_layers=1, pp=2, vpp=1)
    assert reason in str(caught.value)


def test_all_faults_of_a_megatron_layout_come_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse_megatron_layout("t|t|t", num_layers=4, mtp_layers=1, pp=2, vpp=1)
    assert len(caught.value.faults) == 5  # stages, embedding, head, decoder layers, MTP modules


def test_block_counts_place_kinds_embedding_mtp_and_head() -> None:
    """Layers D M M M M on virtual stages 2 1 1 1 (pp 2, vpp 2): stage 0 chunk 0 has D M, all others one M.

    The embedding lies on virtual stage 0 (chunk 0, stage 0), 2 MTP modules and the head on number 3 (chunk 1, stage 1).
    """
    model = make_model((0, 1, 1, 1, 1), mtp_layers=2)
    counts = block_counts(model, layout_of((2, 1, 1, 1), pp=2, vpp=2))
    assert counts.tolist() == [
        [[1, 1, 1, 0, 0], [0, 1, 0, 0, 0]],
        [[0, 1, 0, 0, 0], [0, 1, 0, 2, 1]],
    ]
    assert stage_counts(model, layout_of((2, 1, 1, 1), pp=2, vpp=2)).tolist() == [[1, 2, 1, 0, 0], [0, 2, 0, 2, 1]]


def test_uneven_stages_hold_their_own_layers() -> None:
    """8 layers split 1+2+2+3, the first three dense: D | D D | M M | M M M."""
    counts = stage_counts(make_model((0, 0, 0, 1, 1, 1, 1, 1)), layout_of((1, 2, 2, 3), pp=4, vpp=1))
    assert counts[:, :2].tolist() == [[1, 0], [2, 0], [0, 2], [0, 3]]


def test_one_stage_holds_everything() -> None:
    assert stage_counts(make_model((0, 1)), layout_of((2,), pp=1, vpp=1)).tolist() == [[1, 1, 1, 0, 1]]


def test_a_layout_of_another_model_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        block_counts(make_model((0, 1)), layout_of((1,), pp=1, vpp=1))
