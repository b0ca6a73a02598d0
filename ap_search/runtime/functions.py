"""Functions whose saved tensors are those that the memory model counts."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ap_search.runtime.collectives import apply, wide_dtype

NORM_EPSILON = 1e-6
ROPE_BASE = 10_000.0


class _RmsNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one statistic per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(wide_dtype(x.dtype))
        scale = (wide.square().mean(-1, keepdim=True) + NORM_EPSILON).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].to(scale.dtype)
        normed = x.to(scale.dtype) * scale
        inner = grad * weight
        of_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        of_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
        return of_x.to(x.dtype), of_weight.to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalise rows by their root mean square."""
    return cast(Tensor, apply(_RmsNorm, x, weight))


class _Activation(torch.autograd.Function):
    """SiLU of the first product, times the second and times a scale per row where there are any."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, scale)
        return _activated(gate, up, scale).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = ctx.saved_tensors
        with torch.enable_grad():
            again: Any = [None if one is None else one.detach().requires_grad_() for one in saved]
            out = _activated(again[0], again[1], again[2])
        wanted = [one for one in again if one is not None]
        found = iter(torch.autograd.grad(out, wanted, grads[0].to(out.dtype)))
        return tuple(None if one is None else next(found) for one in again)


def _activated(gate: Tensor, up: Tensor | None, scale: Tensor | None) -> Tensor:
    """Compute in at least float32 what is rounded once."""
    dtype = wide_dtype(gate.dtype)
    value = F.silu(gate.to(dtype))
    if up is not None:
        value = value * up.to(dtype)
    return value if scale is None else value * scale.to(dtype).unsqueeze(-1)


def activation(gate: Tensor, up: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """SwiGLU, or SiLU without `up`, times `scale` per row; the backward repeats it from what went in.

    Parameters
    ----------
    gate : Tensor
        Shape (..., width).
    up : Tensor or None
        Likewise; None where the feed-forward is not gated.
    scale : Tensor or None
        Shape (...): the router's weight of a row.

    Returns
    -------
    Tensor
        Shape and type of `gate`.
    """
    return cast(Tensor, apply(_Activation, gate, up, scale))


class _RouterLogits(torch.autograd.Function):
    """A product in the router's type that saves its input as it came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        of_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
        return of_x, (grad.t() @ x.to(grad.dtype)).to(weight.dtype), None


def router_logits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits of the router in its own type, from rows of any type."""
    return cast(Tensor, apply(_RouterLogits, x, weight, dtype))


def _turned(x: Tensor, direction: float) -> Tensor:
    """Turn pairs of each head by their position, or back."""
    length, width = x.shape[0], x.shape[-1]
    dtype = wide_dtype(x.dtype)
    rates = ROPE_BASE ** (-torch.arange(0, width, 2, device=x.device, dtype=dtype) / width)
    angles = torch.arange(length, device=x.device, dtype=dtype)[:, None] * rates * direction
    cos, sin = (turn(angles)[:, None, None, :].to(x.dtype) for turn in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _Rotate(torch.autograd.Function):
    """Rotary positions; the backward turns back and needs nothing saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _turned(x, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _turned(grads[0], -1.0)


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of each head by their position; shape (seq, batch, heads, width), width even."""
    return cast(Tensor, apply(_Rotate, x))
