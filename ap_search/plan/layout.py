"""Stage layouts: how many decoder layers lie on each virtual pipeline stage, and what each stage then holds."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ap_search.errors import Fault, SpecError
from ap_search.plan.plan import Layout
from ap_search.plan.table import IntArray
from ap_search.spec.blocks import Model

_UNREACHABLE = 2**61
_LOAD_UNITS = 2**30
_MAX_UNROLLED = 100_000

_RUN = re.compile(r"([0-9]{1,6})(?:x([0-9]{1,6}))?")
_ITEM = r"[EtmL|](?:\*[0-9]{1,6})?"
_TERM = re.compile(rf"\((?P<body>(?:{_ITEM})+)\)\*(?P<times>[0-9]{{1,6}})|(?P<item>{_ITEM})")


def layout_of(chunk_layers: Sequence[int], *, pp: int, vpp: int) -> Layout:
    """Make a layout of counts in virtual-stage order; it is even where all counts are the same.

    Parameters
    ----------
    chunk_layers : sequence of int
        Decoder layers per virtual stage, `pp*vpp` numbers; chunk c of stage s is number `c*pp + s`.
    pp, vpp : int
        Pipeline stages, and chunks (virtual stages) on each.

    Returns
    -------
    Layout
    """
    return Layout(pp=pp, vpp=vpp, chunk_layers=tuple(chunk_layers), even=len(set(chunk_layers)) == 1)


def even_layout(num_layers: int, pp: int, vpp: int) -> Layout | None:
    """Divide the layers over all virtual stages, or return None where they do not divide.

    Parameters
    ----------
    num_layers : int
        Decoder layers, MTP modules left out.
    pp, vpp : int
        Pipeline stages, and chunks on each.

    Returns
    -------
    Layout or None

    Notes
    -----
    Source: Megatron-LM `arguments.py` (layers must divide by pp and by the layers of a virtual stage).
    """
    layers, rest = divmod(num_layers, pp * vpp)
    return None if rest or not layers else layout_of((layers,) * (pp * vpp), pp=pp, vpp=vpp)


def padded_layout(num_layers: int, pp: int, vpp: int) -> Layout:
    """Put one layer on each virtual stage until they run out; the stages after them stay empty.

    Parameters
    ----------
    num_layers : int
        Decoder layers, at most `pp*vpp`.
    pp, vpp : int
        Pipeline stages, and chunks on each.

    Returns
    -------
    Layout
        For a plan with more virtual stages than layers, so that it can be priced; a rule refuses it.
    """
    return layout_of((1,) * num_layers + (0,) * (pp * vpp - num_layers), pp=pp, vpp=vpp)


def balanced_layout(*, weights: Sequence[float], first_extra: float, last_extra: float, pp: int, vpp: int) -> Layout:
    """Cut consecutive layers into virtual stages, at least one layer each, so that the heaviest is as light as can be.

    Parameters
    ----------
    weights : sequence of float
        Load of each decoder layer, bottom to top, any unit, at least 0; at least `pp*vpp` of them.
    first_extra : float
        Load that the first virtual stage carries besides (the embedding), same unit.
    last_extra : float
        Load that the last virtual stage carries besides (MTP modules and head), same unit.
    pp, vpp : int
        Pipeline stages, and chunks on each.

    Returns
    -------
    Layout

    Notes
    -----
    A1. Among the cuts with the lightest heaviest stage, the one with the smallest sum of squared loads is taken; among
    those, the one whose last stages hold the most layers, since the first stages keep more micro-batches in flight.
    A2. Loads are rounded to 2^-30 of their sum, so that equal layers are equal wherever they lie.

    Source: our own choice, printed with the plan: Megatron-LM has no default for uneven splits (docs/guides/plans.md).
    """
    stages = pp * vpp
    assert len(weights) >= stages, f"{len(weights)} layers cannot fill {stages} virtual stages"
    loads = np.array(weights, dtype=np.float64)
    # The first layer always lies on the first stage and the last layer on the last, so they can carry the extras.
    loads[0] += first_extra
    loads[-1] += last_extra
    units = np.rint(loads * (_LOAD_UNITS / (loads.sum() or 1.0))).astype(np.int64)
    prefix = np.append(0, np.cumsum(units))
    # Rounding parts equal loads by up to a unit per layer: without that slack, ties for the lightest would be lost.
    bound = _lightest_bound(prefix.tolist(), stages=stages, heaviest_layer=int(units.max())) + len(weights)
    return layout_of(_most_even_cut(prefix, stages=stages, bound=bound), pp=pp, vpp=vpp)


def _lightest_bound(prefix: list[int], *, stages: int, heaviest_layer: int) -> int:
    """Find the smallest load that lets greedy filling finish within `stages` (splitting one further never hurts)."""
    low, high = max(heaviest_layer, -(-prefix[-1] // stages)), prefix[-1]
    while low < high:
        middle = (low + high) // 2
        filled = 0
        for _ in range(stages):
            filled = bisect_right(prefix, prefix[filled] + middle) - 1
        low, high = (low, middle) if filled == len(prefix) - 1 else (middle + 1, high)
    return low


def _most_even_cut(prefix: IntArray, *, stages: int, bound: int) -> list[int]:
    """Choose the counts with the smallest sum of squared stage loads, none above `bound`, by dynamic programming."""
    num_layers = len(prefix) - 1
    reach = np.searchsorted(prefix, prefix + bound, side="right") - 1 - np.arange(num_layers + 1)
    longest = min(int(reach.max()), num_layers - stages + 1)
    # Row j, column k: the stage that ends below layer j holds `longest - k` layers; the longest is first, to win ties.
    starts = np.arange(num_layers + 1)[:, None] - np.arange(longest, 0, -1)[None, :]
    loads = prefix[:, None] - prefix[np.maximum(starts, 0)]
    costs = np.where((starts < 0) | (loads > bound), _UNREACHABLE, loads**2)
    best = np.full(longest + num_layers + 1, _UNREACHABLE, dtype=np.int64)
    best[longest] = 0
    windows = np.lib.stride_tricks.sliding_window_view(best, longest)[: num_layers + 1]
    choices: list[NDArray[np.intp]] = []
    for _ in range(stages):
        totals = windows + costs
        choices.append(totals.argmin(axis=1))
        best[longest:] = np.minimum(totals.min(axis=1), _UNREACHABLE)
    counts, end = [], num_layers
    for choice in reversed(choices):
        counts.append(longest - int(choice[end]))
        end -= counts[-1]
    return counts[::-1]


def layout_text(layout: Layout) -> str:
    """Write a layout as runs of equal counts in virtual-stage order, such as `4x15+1`.

    Parameters
    ----------
    layout : Layout
        Any layout.

    Returns
    -------
    str
        What `parse_layout` reads back into the same layout.
    """
    runs = [(count, len(list(equal))) for count, equal in groupby(layout.chunk_layers)]
    return "+".join(f"{count}x{times}" if times > 1 else str(count) for count, times in runs)


def parse_layout(
    text: str, *, num_layers: int, mtp_layers: int = 0, pp: int, vpp: int, path: str = "stage_layers"
) -> Layout:
    """Read a layout from counts (`4x15+1`, `1+2+2+3`) or from Megatron's layout string (which contains `|`).

    Parameters
    ----------
    text : str
        `COUNT` or `COUNTxTIMES`, joined by `+`: one count per stage (which its chunks share evenly), or one per virtual
        stage in order (chunk c of stage s is number `c*pp + s`). 0 is an empty stage.
    num_layers, mtp_layers : int
        Decoder layers and MTP modules of the model.
    pp, vpp : int
        Pipeline stages, and chunks on each.
    path : str
        Where the text came from, for the error.

    Returns
    -------
    Layout

    Raises
    ------
    SpecError
        The text cannot be read, has the wrong number of counts, or does not sum to the model's layers.
    """
    if "|" in text:
        return parse_megatron_layout(text, num_layers=num_layers, mtp_layers=mtp_layers, pp=pp, vpp=vpp, path=path)
    runs = [_parse_run(run, path=path) for run in text.split("+")]
    numbers = sum(times for _, times in runs)
    if numbers not in (pp, pp * vpp):
        legal = f"{pp} numbers" if vpp == 1 else f"{pp} numbers, or {pp * vpp} in virtual-stage order"
        raise SpecError(path, f"has {numbers} numbers for pp={pp} vpp={vpp}", legal)
    total = sum(count * times for count, times in runs)
    if total != num_layers:
        raise SpecError(path, f"sums to {total} layers", f"numbers that sum to the model's {num_layers} layers")
    counts = [count for count, times in runs for _ in range(times)]
    return layout_of(counts if numbers == pp * vpp else _share(counts, vpp=vpp, path=path), pp=pp, vpp=vpp)


def _parse_run(run: str, *, path: str) -> tuple[int, int]:
    """Read `COUNT` or `COUNTxTIMES`."""
    match = _RUN.fullmatch(run.strip())
    if match is None:
        raise SpecError(path, f"{run[:40]!r} is no count of layers", "counts such as 4x15+1 or 1+2+2+3")
    return int(match[1]), int(match[2] or 1)


def _share(stage_layers: list[int], *, vpp: int, path: str) -> list[int]:
    """Spread each stage's layers evenly over its chunks."""
    for stage, layers in enumerate(stage_layers):
        if layers % vpp:
            legal = f"{len(stage_layers) * vpp} numbers in virtual-stage order"
            raise SpecError(path, f"the {layers} layers of stage {stage} do not split over vpp={vpp} chunks", legal)
    return [layers // vpp for layers in stage_layers] * vpp


def parse_megatron_layout(
    text: str, *, num_layers: int, mtp_layers: int, pp: int, vpp: int, path: str = "stage_layers"
) -> Layout:
    """Read Megatron's layout string, such as `Et*3|(tt|)*29mL`.

    Parameters
    ----------
    text : str
        `E` embedding, `t` decoder layer, `m` MTP module, `L` head and loss, `|` ends a virtual stage; `x*n` repeats one
        character, `(...)*n` a group; commas and blanks mean nothing.
    num_layers, mtp_layers : int
        Decoder layers and MTP modules of the model, which the string must hold.
    pp, vpp : int
        Pipeline stages, and chunks on each; their product is the number of virtual stages.
    path : str
        Where the text came from, for the error.

    Returns
    -------
    Layout

    Raises
    ------
    SpecError
        The text cannot be read, or what it holds differs from the model or from a `Layout`: all faults at once.

    Notes
    -----
    A1. A `Layout` has the embedding on the first virtual stage, MTP modules and head on the last: other places are
    refused.

    Source: Megatron-Core `pipeline_parallel_layer_layout.py`.
    """
    unrolled = _unroll(re.sub(r"[\s,]", "", text), path=path)
    stages = unrolled.split("|")
    faults = [*_stage_faults(len(stages), pp=pp, vpp=vpp, path=path), *_place_faults(unrolled, path=path)]
    for letter, what, wanted in (("t", "decoder layers", num_layers), ("m", "MTP modules", mtp_layers)):
        if unrolled.count(letter) != wanted:
            faults.append(
                Fault(path=path, reason=f"holds {unrolled.count(letter)} {what}", legal=f"{wanted}, as the model")
            )
    if faults:
        raise SpecError.of(faults)
    return layout_of([stage.count("t") for stage in stages], pp=pp, vpp=vpp)


def _unroll(text: str, *, path: str) -> str:
    """Write all repetitions of a layout string out, refusing what would grow beyond any model."""
    pieces: list[str] = []
    position = length = 0
    while position < len(text):
        match = _TERM.match(text, position)
        if match is None:
            raise SpecError(path, f"cannot be read at {text[position : position + 20]!r}", "E t m L | x*n (...)*n")
        items = [(item[0], int(item[2:] or 1)) for item in re.findall(_ITEM, match["item"] or match["body"])]
        times = int(match["times"] or 1)
        length += times * sum(many for _, many in items)
        if length > _MAX_UNROLLED:
            raise SpecError(path, "holds too many layers and stages", f"at most {_MAX_UNROLLED}")
        pieces.append("".join(letter * many for letter, many in items) * times)
        position = match.end()
    return "".join(pieces)


def _stage_faults(stages: int, *, pp: int, vpp: int, path: str) -> list[Fault]:
    """Check the number of virtual stages against pp and vpp."""
    if stages == pp * vpp:
        return []
    legal = f"vpp={stages // pp}" if stages % pp == 0 else f"a multiple of pp={pp}"
    return [Fault(path=path, reason=f"has {stages} virtual stages, but pp={pp} vpp={vpp} has {pp * vpp}", legal=legal)]


def _place_faults(unrolled: str, *, path: str) -> list[Fault]:
    """Check that embedding, MTP modules and head lie where a `Layout` has them."""
    checks = (
        (r"E[^E]*", "the embedding E must come once, first on the first virtual stage"),
        (r"[^L]*L", "the head L must come once, last on the last virtual stage"),
        (r"[^m]*m*L*", "MTP modules m are priced only beside the head L, after all layers of the last virtual stage"),
    )
    return [Fault(path=path, reason=reason) for pattern, reason in checks if not re.fullmatch(pattern, unrolled)]


def block_counts(model: Model, layout: Layout) -> IntArray:
    """Count the blocks of each kind on each virtual stage.

    Parameters
    ----------
    model : Model
        Its layer kinds and their order.
    layout : Layout
        Places all of the model's decoder layers.

    Returns
    -------
    IntArray
        Shape (vpp, pp, len(model.kinds) + 3): layers of each kind, then embeddings, MTP modules and heads.

    Notes
    -----
    A1. The embedding lies on the first virtual stage, MTP modules and head on the last.

    Source: Megatron-Core `pipeline_parallel_layer_layout.py`, `multi_token_prediction.py` (stage placement).
    """
    assert sum(layout.chunk_layers) == model.num_layers, (
        f"{layout_text(layout)} does not place {model.num_layers} layers"
    )
    stages = layout.pp * layout.vpp
    counts = np.zeros((stages, len(model.kinds) + 3), dtype=np.int64)
    stage_of_layer = np.repeat(np.arange(stages), layout.chunk_layers)
    np.add.at(counts, (stage_of_layer, np.array(model.layers, dtype=np.int64)), 1)
    counts[0, -3] = 1
    counts[-1, -2] = model.mtp_layers
    counts[-1, -1] = 1
    return counts.reshape(layout.vpp, layout.pp, -1)


def stage_counts(model: Model, layout: Layout) -> IntArray:
    """Count the blocks of each kind on each pipeline stage, all its chunks together.

    Parameters
    ----------
    model, layout
        As for `block_counts`.

    Returns
    -------
    IntArray
        Shape (pp, len(model.kinds) + 3), the kinds as in `block_counts`.
    """
    counts: IntArray = block_counts(model, layout).sum(axis=0)
    return counts
