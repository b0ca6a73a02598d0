"""Checks made of what all ranks report: numbers against one process, bytes and counts against the prediction."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ap_search.result.verification import Check
from ap_search.runtime.prediction import KINDS, ROLES, RankFigures
from ap_search.spec.blocks import Attention, Model

# Largest difference over the largest value of a tensor. A bfloat16 number has 8 bits, so each operation errs by 0.4 %.
RATIO_TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1}

# Why a number of a bfloat16 run may be off without a fault.
NEAR_TIES = "in bfloat16 experts whose scores nearly tie are chosen otherwise than in one process; float64 proves more"

PRICED = ("dispatch", "combine", "tp", "pp", "dp")
# Traffic that is counted apart, since no price holds it.
UNPRICED = {
    "layout": "counts of tokens that DeepEP's kernels exchange among themselves; 8 bytes per pair of ranks",
    "loss": "maxima and sums of the split cross-entropy, a few bytes per token",
    "tp_replicated": "gradients of norms and routers summed over tp once per step under sequence parallelism",
}

# What is kept in another form than that of the trainers that the memory model describes.
ROUTING_APART = (
    "the memory model counts logits, scores and maps as Megatron-LM and DeepEP keep them; the runtime keeps scores, "
    "chosen experts and lists of rows"
)
UNFUSED_ATTENTION = (
    "PyTorch has no fused attention on CPUs where value heads are not as wide as query heads, and keeps the scores"
)

Read = Callable[[RankFigures], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far one tensor of one rank is from the reference: largest difference over the largest value."""

    name: str
    ratio: float
    where: str


def number_checks(differences: Iterable[Difference], *, dtype: str, routed: bool) -> tuple[Check, ...]:
    """Make one check of all differences of one name, of which the largest counts.

    Parameters
    ----------
    differences : iterable of Difference
        From every rank and step.
    dtype : str
        Type of the run; it sets the tolerance.
    routed : bool
        Whether a router chooses experts.

    Returns
    -------
    tuple of Check
        In the order in which names first appear. What is off in a routed bfloat16 run is an exception, unless it is no
        number.
    """
    worst: dict[str, Difference] = {}
    for difference in differences:
        known = worst.setdefault(difference.name, difference)
        if _badness(difference) > _badness(known):
            worst[difference.name] = difference
    tolerance = RATIO_TOLERANCE[dtype]
    checks = (
        Check(
            name=name,
            ok=found.ratio <= tolerance,
            expected=0.0,
            actual=found.ratio if math.isfinite(found.ratio) else None,
            tolerance=tolerance,
            unit="ratio",
            where=found.where,
        )
        for name, found in worst.items()
    )
    if not (routed and dtype == "bfloat16"):
        return tuple(checks)
    return tuple(
        check if check.ok or check.actual is None else replace(check, ok=True, exception=NEAR_TIES) for check in checks
    )


def _badness(difference: Difference) -> float:
    """Order differences: what is no number is worse than any."""
    return math.inf if math.isnan(difference.ratio) else difference.ratio


def figure_checks(model: Model, predicted: Sequence[RankFigures], counted: Sequence[RankFigures]) -> tuple[Check, ...]:
    """Compare bytes and counts of every rank with the prediction; equal means equal.

    Parameters
    ----------
    model : Model
        Which layers hold experts.
    predicted, counted : sequence of RankFigures
        Per rank.

    Returns
    -------
    tuple of Check
        Traffic per purpose, state per kind and role, saved bytes per kind of block, micro-batches in flight.
    """
    pairs = tuple(zip(predicted, counted, strict=True))
    checks = [_compared(f"bytes.{purpose}", pairs, _sent(purpose)) for purpose in PRICED]
    checks += _unpriced(counted)
    checks += [_compared(f"bytes.{role}.{kind}", pairs, _kept(kind, role)) for role in ROLES for kind in KINDS]
    checks += _saved_checks(model, pairs)
    return (*checks, _in_flight_check(pairs))


def _sent(purpose: str) -> Read:
    """Read what a rank sends for a purpose."""
    return lambda figures: figures.sent.get(purpose, 0)


def _kept(kind: str, role: str) -> Read:
    """Read what a rank keeps of a kind of parameters."""
    return lambda figures: figures.state.get((kind, role), 0)


def _compared(name: str, pairs: Sequence[tuple[RankFigures, RankFigures]], read: Read) -> Check:
    """Compare one figure on every rank: the one that is furthest off is shown, or the largest where all agree."""
    expected, actual, rank = max(
        ((read(left), read(right), right.rank) for left, right in pairs),
        key=lambda found: (abs(found[0] - found[1]), found[0]),
    )
    return _exact(name, expected, actual, f"rank {rank}")


def _exact(name: str, expected: int, actual: int, where: str) -> Check:
    """Make a check of two numbers of bytes that must be equal."""
    return Check(
        name=name, ok=expected == actual, expected=expected, actual=actual, tolerance=0.0, unit="bytes", where=where
    )


def _unpriced(counted: Sequence[RankFigures]) -> list[Check]:
    """Show traffic that no price holds with the reason; traffic without a reason fails."""
    checks = []
    for purpose in sorted({name for figures in counted for name in figures.sent} - set(PRICED)):
        busiest = max(counted, key=_sent(purpose))
        sent = busiest.sent.get(purpose, 0)
        if sent:
            checks.append(
                Check(
                    name=f"bytes.{purpose}",
                    ok=purpose in UNPRICED,
                    expected=0.0,
                    actual=sent,
                    tolerance=0.0,
                    unit="bytes",
                    where=f"rank {busiest.rank}",
                    exception=UNPRICED.get(purpose, ""),
                )
            )
    return checks


def _block_kind(model: Model, block: str) -> str:
    """Name what is alike to the memory model: embedding, head, dense layers, layers with experts."""
    if block.endswith(" routing"):
        return "routing"
    if not block.startswith("layers."):
        return block
    kind = model.kinds[model.layers[int(block.removeprefix("layers."))]]
    return "moe_layer" if kind.is_moe else "dense_layer"


def _saved_checks(model: Model, pairs: Sequence[tuple[RankFigures, RankFigures]]) -> list[Check]:
    """Compare what blocks save for backward, one check for each kind of block."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    ran = {block for _, right in pairs for block in right.saved}
    for left, right in pairs:
        for block, sizes in right.saved.items():
            wanted = left.saved.get(block, ())
            for index, size in enumerate(sizes):
                where = f"rank {right.rank}, {block}, forward {index}"
                entry = (wanted[index] if index < len(wanted) else 0, size, where)
                found.setdefault(_block_kind(model, block), []).append(entry)
        # Predicted are the blocks of all stages; one that ran on no rank at all is missed.
        for block in sorted(left.saved.keys() - ran):
            entry = (sum(left.saved[block]), 0, f"rank {right.rank}, {block}, on no rank")
            found.setdefault(_block_kind(model, block), []).append(entry)
    checks = []
    for kind in sorted(found):
        expected, actual, where = max(found[kind], key=lambda entry: (abs(entry[0] - entry[1]), entry[0]))
        check = _exact(f"bytes.saved.{kind}", expected, actual, where)
        reason = _unlike(model, kind)
        checks.append(replace(check, ok=True, exception=reason) if reason and not check.ok else check)
    return checks


def _unlike(model: Model, kind: str) -> str:
    """Say why one kind of block need not keep what the memory model says, nothing where it must."""
    if kind == "routing":
        return ROUTING_APART
    mixers = (each.mixer for each in model.kinds)
    wide = any(isinstance(mixer, Attention) and mixer.v_head_dim != mixer.qk_head_dim for mixer in mixers)
    return UNFUSED_ATTENTION if wide and kind.endswith("_layer") else ""


def _in_flight_check(pairs: Sequence[tuple[RankFigures, RankFigures]]) -> Check:
    """Compare the worst moments of every stage; shown are micro-batches in flight, all chunks together."""
    off = [(left, right) for left, right in pairs if left.in_flight != right.in_flight]
    left, right = (off or pairs)[0]
    return Check(
        name="in_flight",
        ok=not off,
        expected=_most(left.in_flight),
        actual=_most(right.in_flight),
        tolerance=0.0,
        unit="count",
        where=f"rank {right.rank}",
    )


def _most(vectors: Sequence[Sequence[int]]) -> int:
    """Most micro-batches in flight at any moment."""
    return max((sum(vector) for vector in vectors), default=0)


def guarded_dispatches(events: Iterable[str], *, sharded: bool) -> tuple[int, int]:
    """Count dispatches, and those whose experts' weights are gathered before and freed only after the combine.

    Parameters
    ----------
    events : iterable of str
        `layers.1 unshard`, `layers.1 dispatch`, `layers.1 combine`, `layers.1 reshard` in the order observed.
    sharded : bool
        Whether weights are shards outside a forward; otherwise they are always whole.

    Returns
    -------
    tuple of int
        All dispatches, and the guarded ones.

    Notes
    -----
    A1. A forward that recompute repeats may end before its combine: what autograd wants is there by then.
    """
    whole: dict[str, bool] = {}
    held: dict[str, bool] = {}
    dispatches = guarded = 0
    for layer, event in (entry.rsplit(" ", 1) for entry in events):
        gathered = whole.setdefault(layer, not sharded)
        if event == "dispatch":
            dispatches += 1
            guarded += gathered
            held[layer] = gathered
        elif event == "combine":
            guarded -= gathered < held[layer]
        else:
            whole[layer] = event == "unshard"
    return dispatches, guarded


def hook_order_checks(found: Sequence[tuple[int, int]]) -> tuple[Check, ...]:
    """Make the check that every dispatch of every rank ran between gathering and freeing the experts' weights.

    Parameters
    ----------
    found : sequence of tuple of int
        Per rank, what `guarded_dispatches` gave.

    Returns
    -------
    tuple of Check
        None where no layer has experts.
    """
    expected, actual = (sum(column) for column in zip(*found, strict=True))
    if not expected:
        return ()
    worst = max(range(len(found)), key=lambda rank: found[rank][0] - found[rank][1])
    check = Check(
        name="hook_order",
        ok=expected == actual,
        expected=expected,
        actual=actual,
        tolerance=0.0,
        unit="count",
        where=f"rank {worst}" if expected != actual else "all ranks",
    )
    return (check,)


def state_table(entries: Iterable[tuple[str, str, int]]) -> Mapping[tuple[str, str], int]:
    """Add up bytes by kind and role."""
    table: dict[tuple[str, str], int] = {}
    for kind, role, size_bytes in entries:
        table[kind, role] = table.get((kind, role), 0) + size_bytes
    return table
