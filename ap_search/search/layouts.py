"""Which layout stages get: the even one where layers divide, otherwise one balanced by FLOPs; always that for some."""

from functools import cached_property

from ap_search.cost.context import CostContext
from ap_search.cost.flops import head_flops_per_token, layer_flops_per_token, mtp_flops_per_token
from ap_search.plan.filled_layout import filled_layout
from ap_search.plan.layout import balanced_layout, even_layout
from ap_search.plan.plan import Layout
from ap_search.spec.blocks import Model


class LayoutMaker:
    """Makes and remembers one layout per (pp, vpp) for one model and sequence length.

    `even` is False for trainers that fill their stages in order by cost.
    """

    def __init__(self, model: Model, seq_len: int, *, even: bool = True) -> None:
        self._model = model
        self._seq_len = seq_len
        self._even = even
        self._made: dict[tuple[int, int], Layout | None] = {}

    @cached_property
    def _weights(self) -> tuple[float, ...]:
        """FLOPs of each decoder layer per token."""
        kinds = [layer_flops_per_token(self._model, kind, self._seq_len) for kind in self._model.kinds]
        return tuple(kinds[index] for index in self._model.layers)

    @cached_property
    def _last_extra(self) -> float:
        """FLOPs that the last stage carries besides: head and MTP modules."""
        depths = self._model.mtp_layers * mtp_flops_per_token(self._model, self._seq_len)
        return head_flops_per_token(self._model) + depths

    def __call__(self, pp: int, vpp: int) -> Layout | None:
        """Give the layout of pp stages of vpp chunks, None where there are fewer layers than virtual stages."""
        key = (pp, vpp)
        if key not in self._made:
            self._made[key] = self._make(pp, vpp)
        return self._made[key]

    def balanced(self, pp: int, vpp: int) -> Layout:
        """Cut the layers so that the heaviest virtual stage has the fewest FLOPs, head and MTP modules counted.

        Trainers that fill their stages in order do so without virtual stages.
        """
        if not self._even and vpp == 1:
            return filled_layout(self._model, pp)
        return balanced_layout(weights=self._weights, first_extra=0.0, last_extra=self._last_extra, pp=pp, vpp=vpp)

    def _make(self, pp: int, vpp: int) -> Layout | None:
        if pp * vpp > self._model.num_layers:
            return None
        return (even_layout(self._model.num_layers, pp, vpp) if self._even else None) or self.balanced(pp, vpp)


def layout_maker(context: CostContext) -> LayoutMaker:
    """Make layouts as the software of a search places its layers."""
    return LayoutMaker(context.model, context.job.seq_len, even=not context.software.fills_stages)
