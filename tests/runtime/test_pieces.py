"""The router and the functions of the runtime in one process, against plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ap_search.runtime.cuts import draw, initialise
from ap_search.runtime.functions import activation, rms_norm, rotate, router_logits
from ap_search.runtime.routing import Router
from ap_search.runtime.tensor import ALONE, cross_entropy
from ap_search.spec.blocks import MoeFfn


def _random(*shape: int, seed: int = 0) -> Tensor:
    """Values that need gradients."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def _same(ours: Tensor, plain: Tensor, inputs: list[Tensor]) -> None:
    """Equal values and gradients."""
    assert torch.allclose(ours, plain, rtol=1e-12, atol=1e-12)
    upstream = torch.linspace(-1, 1, plain.numel(), dtype=torch.float64).view_as(plain)
    for one, other in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(plain, inputs, upstream), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_norm_activation_and_logits() -> None:
    """Values and gradients of PyTorch's own operators."""
    x, weight = _random(5, 3, 8), _random(8, seed=1)
    _same(rms_norm(x, weight), F.rms_norm(x, (8,), weight, eps=1e-6), [x, weight])
    gate, up, scale = _random(7, 4), _random(7, 4, seed=1), _random(7, seed=2)
    _same(activation(gate, up, scale), F.silu(gate) * up * scale[:, None], [gate, up, scale])
    _same(activation(gate, None), F.silu(gate), [gate])
    rows, matrix = _random(6, 8), _random(4, 8, seed=3)
    _same(router_logits(rows, matrix, torch.float64), rows @ matrix.t(), [rows, matrix])


def test_cross_entropy_of_one_rank() -> None:
    """PyTorch's own, with labels on both ends of the vocabulary."""
    logits, labels = _random(5, 3, 11), torch.tensor([[0, 10, 3], [4, 4, 0], [10, 1, 2], [7, 8, 9], [5, 6, 0]])
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(5, 3)
    _same(cross_entropy(logits, labels, ALONE), plain, [logits])


def test_rotation_keeps_relative_positions() -> None:
    """Products of queries and keys depend on the distance alone, and lengths do not change."""
    query = rotate(_random(1, 1, 1, 8).detach().expand(6, -1, -1, -1))
    key = rotate(_random(1, 1, 1, 8, seed=1).detach().expand(6, -1, -1, -1))
    scores = torch.einsum("sbhd,tbhd->st", query, key)
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal))
    assert torch.allclose(query.norm(dim=-1), query[0].norm(dim=-1).expand(6, 1, 1))
    x = _random(6, 2, 3, 8)
    assert torch.autograd.gradcheck(rotate, (x,))


def _router(moe: MoeFfn, **values: Tensor) -> Router:
    """A router with given tensors."""
    router = Router(moe, 4, dtype=torch.float64, router_dtype=torch.float64)
    initialise(router, 0)
    with torch.no_grad():
        for name, value in values.items():
            getattr(router, name).copy_(value)
    return router


def test_weights_of_the_chosen_sum_to_one() -> None:
    """For softmax and sigmoid; a single expert keeps its score, or the router would learn nothing."""
    x = _random(9, 4)
    for function in ("softmax", "sigmoid"):
        chosen, weights = _router(MoeFfn(num_experts=8, top_k=3, expert_width=4, score_function=function))(x)
        assert torch.allclose(weights.sum(-1), torch.ones(9, dtype=torch.float64))
        assert all(len(set(row)) == 3 for row in chosen.tolist())
    single = _router(MoeFfn(num_experts=8, top_k=1, expert_width=4))
    _, weights = single(x)
    weights.sum().backward()
    assert bool((weights < 1).all())
    assert bool(single.get_parameter("weight").grad.any())


def test_score_bias_chooses_but_does_not_weigh() -> None:
    """A large bias puts an expert among the chosen; the weights come from the scores alone."""
    moe = MoeFfn(num_experts=8, top_k=2, expert_width=4, score_function="sigmoid", score_bias=True)
    bias = torch.zeros(8, dtype=torch.float64)
    bias[6] = 10.0
    router, x = _router(moe, score_bias=bias), _random(9, 4)
    chosen, weights = router(x)
    assert bool((chosen == 6).any(dim=1).all())
    scores = (x @ router.get_parameter("weight").t()).sigmoid().gather(1, chosen)
    assert torch.allclose(weights, scores / scores.sum(-1, keepdim=True))


def test_experts_lie_in_few_groups() -> None:
    """Group-limited routing: two of four groups, those with the best expert, or the best two with a score bias."""
    for biased in (False, True):
        moe = MoeFfn(
            num_experts=16, top_k=4, expert_width=4, num_groups=4, topk_groups=2, score_bias=biased,
            score_function="sigmoid",
        )  # fmt: skip
        router, x = _router(moe), _random(40, 4)
        chosen, _ = router(x)
        assert max(len(set((row // 4).tolist())) for row in chosen) == 2
        scores = (x @ router.get_parameter("weight").t()).sigmoid().detach()
        scores = scores + router.get_buffer("score_bias") if biased else scores
        groups = scores.unflatten(-1, (4, 4)).topk(2 if biased else 1).values.sum(-1).topk(2).indices
        for row, allowed in zip(chosen, groups, strict=True):
            assert set((row // 4).tolist()) <= set(allowed.tolist())


def test_initial_values_follow_name_and_seed_alone() -> None:
    """The same on every rank, different for every parameter and seed."""
    assert torch.equal(draw("layers.1.a", (3, 4), 0), draw("layers.1.a", (3, 4), 0))
    assert not torch.equal(draw("layers.1.a", (3, 4), 0), draw("layers.2.a", (3, 4), 0))
    assert not torch.equal(draw("layers.1.a", (3, 4), 0), draw("layers.1.a", (3, 4), 1))
