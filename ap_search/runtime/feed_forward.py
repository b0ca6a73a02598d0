"""A dense feed-forward, also used for shared experts."""

import torch
from torch import Tensor

from ap_search.runtime.cuts import CutModule
from ap_search.runtime.functions import activation
from ap_search.runtime.tensor import ALONE, TensorGroup, column_products, row_product


class FeedForward(CutModule):
    """SwiGLU, or two matrices with SiLU where it is not gated."""

    def __init__(self, hidden: int, width: int, *, gated: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.tensor = ALONE
        self.add("gate", (width, hidden), dtype)
        if gated:
            self.add("up", (width, hidden), dtype)
        self.add("down", (hidden, width), dtype)

    def split(self, tensor: TensorGroup) -> None:
        """Keep this rank's inner width."""
        self.tensor = tensor
        for name in self.cuts:
            self.narrow(name, dim=1 if name == "down" else 0, index=tensor.rank, count=tensor.size)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens of shape (seq, batch, hidden) to the same shape."""
        names = [name for name in ("gate", "up") if name in self.cuts]
        gate, *up = column_products(x, tuple(self.get_parameter(name) for name in names), self.tensor)
        return row_product(activation(gate, up[0] if up else None), self.get_parameter("down"), self.tensor)
