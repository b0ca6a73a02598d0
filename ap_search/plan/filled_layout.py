"""Stage layouts of trainers that fill their stages in order by cost, whatever divides evenly."""

from itertools import accumulate

from ap_search.plan.layout import layout_of
from ap_search.plan.plan import Layout
from ap_search.spec.blocks import Model
from ap_search.spec.parameters import active_layer_params, layer_params


def filled_layout(model: Model, pp: int) -> Layout:
    """Fill stages in order: each takes blocks until it holds more than its share of all matrices' parameters.

    Parameters
    ----------
    model : Model
        Layers and vocabulary.
    pp : int
        Stages, at most the number of layers.

    Returns
    -------
    Layout
        The block that crosses a stage's threshold still belongs to it, so early stages hold more.

    Notes
    -----
    A1. A layer costs its active parameters without norms, the head its matrix, the embedding nothing.

    Source: huggingface/nanotron e24d2483 `models/base.py` (build_model), `models/llama.py` (get_block_compute_costs).
    """
    kinds = [active_layer_params(model, kind) - layer_params(model, kind).norms for kind in model.kinds]
    costs = [kinds[kind] for kind in model.layers]
    total = sum(costs) + model.vocab_size * model.hidden_size
    counts = [0] * pp
    stage = 0
    for reached in accumulate(costs):
        counts[stage] += 1
        if reached * pp > total * (stage + 1):
            stage += 1
    return layout_of(counts, pp=pp, vpp=1)
