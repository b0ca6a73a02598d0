"""What is counted is what is sent and saved: known amounts."""

import ast

import torch
from torch import nn

from ap_search.runtime.agreement import UNPRICED
from ap_search.runtime.counters import SavedBytes
from ap_search.runtime.launch import launch
from tests.verify import ranks


def test_bytes_sent_are_counted_per_purpose() -> None:
    """Two ranks, fp32. On rank 0: all-reduce of 24 values 2 * 1/2 * 96, gather and reduce-scatter 48 each, a gather
    under a label 48, a message of 20, and 2 rows of 8 bytes to the other rank, whose gradient is 1 row on its way back.
    """
    answer = launch(ranks.counting, "", devices=2, timeout_s=60, progress=lambda what, share: None)
    assert ast.literal_eval(answer) == {"dp": 96 + 48 + 48, "tp": 48, "pp": 20, "dispatch": 2 * 8 + 1 * 8}


def test_an_unknown_way_to_send_has_a_name_that_no_check_knows() -> None:
    """A scatter is none of the runtime's; a barrier sends nothing."""
    answer = launch(ranks.scattering, "", devices=2, timeout_s=60, progress=lambda what, share: None)
    (purpose,) = ast.literal_eval(answer)
    assert purpose == "c10d.scatter_"
    assert purpose not in UNPRICED


class _Block(nn.Module):
    """Saves its input for the product (its weight does not count), and the square's input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Square of a product."""
        return self.linear(x).square()


def test_bytes_saved_are_counted_per_block_once() -> None:
    """The first block saves its input (3 x 4) and the product (3 x 8), the second its input (3 x 8)."""
    first, second = _Block(), nn.Linear(8, 2, bias=False)
    saved = SavedBytes([("first", first), ("second", second)], dtype=torch.float32)
    with saved.counting():
        for _ in range(2):
            out = second(first(torch.ones(3, 4)))
            out.sum().backward()
    assert dict(saved.by_block) == {"first": [4 * (12 + 24)] * 2, "second": [4 * 24] * 2}


def test_what_no_block_saves_is_the_losses_and_backward_keeps_nothing() -> None:
    """The loss squares 3 x 8 values; the block's own tensors are not counted again; no hook is left behind."""
    block = _Block()
    saved = SavedBytes([("block", block)], dtype=torch.float32)
    with saved.counting():
        block(torch.ones(3, 4)).square().sum().backward(create_graph=False)
    assert dict(saved.by_block) == {"block": [4 * (12 + 24)], "loss": [4 * 24]}
    block(torch.ones(3, 4)).sum().backward()
    assert dict(saved.by_block) == {"block": [4 * (12 + 24)], "loss": [4 * 24]}
