"""Grouped-query attention with rotary positions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ap_search.runtime.cuts import CutModule
from ap_search.runtime.functions import rms_norm, rotate
from ap_search.runtime.tensor import ALONE, TensorGroup, column_products, row_product
from ap_search.spec.blocks import Attention, QkNorm


class SelfAttention(CutModule):
    """Causal softmax attention; heads are split over tp."""

    def __init__(self, attention: Attention, hidden: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention, self.tensor = attention, ALONE
        self.add("query", (attention.num_heads * attention.qk_head_dim, hidden), dtype)
        self.add("key", (attention.num_kv_heads * attention.qk_head_dim, hidden), dtype)
        self.add("value", (attention.num_kv_heads * attention.v_head_dim, hidden), dtype)
        self.add("output", (hidden, attention.num_heads * attention.v_head_dim), dtype)
        if attention.qk_norm is QkNorm.HEAD:
            self.add("query_norm_weight", (attention.qk_head_dim,), dtype)
            self.add("key_norm_weight", (attention.qk_head_dim,), dtype)

    def split(self, tensor: TensorGroup) -> None:
        """Keep this rank's heads; norms over a head stay whole, and each rank has the gradient of its own heads."""
        self.tensor = tensor
        for name in ("query", "key", "value"):
            self.narrow(name, dim=0, index=tensor.rank, count=tensor.size)
        self.narrow("output", dim=1, index=tensor.rank, count=tensor.size)
        self.mark_partial(*(name for name in self.cuts if name.endswith("norm_weight")))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens of shape (seq, batch, hidden) to the same shape."""
        names = ("query", "key", "value")
        products = column_products(x, tuple(self.get_parameter(name) for name in names), self.tensor)
        widths = (self.attention.qk_head_dim, self.attention.qk_head_dim, self.attention.v_head_dim)
        query, key, value = (one.unflatten(-1, (-1, width)) for one, width in zip(products, widths, strict=True))
        if self.attention.qk_norm is QkNorm.HEAD:
            query = rms_norm(query, self.get_parameter("query_norm_weight"))
            key = rms_norm(key, self.get_parameter("key_norm_weight"))
        heads = [one.permute(1, 2, 0, 3) for one in (rotate(query), rotate(key), value)]
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True, enable_gqa=True)
        return row_product(mixed.permute(2, 0, 1, 3).flatten(-2), self.get_parameter("output"), self.tensor)
