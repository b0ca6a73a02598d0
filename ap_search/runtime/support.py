"""What the runtime cannot run, each refused by name. No torch is needed to know it."""

import math
from collections.abc import Iterable

from ap_search.errors import Fault, SpecError
from ap_search.plan.plan import Dispatcher, Plan, Recompute, Schedule, Sharding
from ap_search.plan.text import dispatcher_text, recompute_text, schedule_text
from ap_search.runtime.settings import DTYPES, RunSettings
from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, LayerKind, LinearMixer, Model, MoeFfn, QkNorm

Check = tuple[bool, str, str, str]


def check_supported(model: Model, plan: Plan, settings: RunSettings) -> None:
    """Refuse what the runtime does not run.

    Parameters
    ----------
    model : Model
        Its kinds of layers.
    plan : Plan
        Its axes and knobs.
    settings : RunSettings
        Sequence length, types, capacity.

    Raises
    ------
    SpecError
        Every fault, with the legal kinds.
    """
    faults = unsupported(model, plan, settings)
    if faults:
        raise SpecError.of(faults)


def unsupported(model: Model, plan: Plan, settings: RunSettings) -> tuple[Fault, ...]:
    """List everything that the runtime does not run of a model, a plan and settings; as `check_supported`."""
    checks = [*_model_checks(model), *_plan_checks(model, plan), *_size_checks(model, plan, settings)]
    for i, kind in enumerate(model.kinds):
        checks += _kind_checks(f"model: kinds[{i}]", kind)
        checks += _split_checks(kind, plan)
    found = (Fault(path=path, reason=reason, legal=legal) for bad, path, reason, legal in checks if bad)
    return tuple(dict.fromkeys(found))


def _model_checks(model: Model) -> Iterable[Check]:
    """Faults of the model as a whole."""
    yield model.mtp_layers > 0, "model: mtp_layers", "multi-token prediction is not run", "0"
    yield model.learned_positions > 0, "model: learned_positions", "learned positions are not run", "0 (rotary)"
    yield model.head_bias, "model: head_bias", "a bias on the head is not run", "false"
    yield model.embedding_norm, "model: embedding_norm", "a norm after the embedding is not run", "false"


def _kind_checks(path: str, kind: LayerKind) -> Iterable[Check]:
    """Faults of one kind of layer."""
    yield kind.num_norms != 2, f"{path}.num_norms", f"{kind.num_norms} norms are not run", "2"
    if isinstance(kind.mixer, Attention):
        yield from _attention_checks(f"{path}.attention", kind.mixer)
    else:
        name = kind.mixer.name if isinstance(kind.mixer, LinearMixer) else "a layer without a mixer"
        yield True, f"{path}.mixer", f"{name} is not run", "gqa attention"
    if isinstance(kind.ffn, MoeFfn):
        yield kind.ffn.expert_bias, f"{path}.moe.expert_bias", "biases of experts are not run", "false"
        known = kind.ffn.score_function in ("softmax", "sigmoid")
        reason = f"{kind.ffn.score_function!r} scores are not run"
        yield not known, f"{path}.moe.score_function", reason, "softmax sigmoid"
    elif isinstance(kind.ffn, DenseFfn):
        yield kind.ffn.bias, f"{path}.ffn.bias", "biases of a feed-forward are not run", "false"
    else:
        yield True, f"{path}.ffn", "a layer without a feed-forward is not run", "dense or moe"


def _attention_checks(path: str, mixer: Attention) -> Iterable[Check]:
    """Faults of attention."""
    yield mixer.kind is AttentionKind.MLA, f"{path}.kind", "mla is not run", "gqa"
    yield mixer.window > 0, f"{path}.window", "a window is not run", "0"
    yield mixer.index_topk > 0, f"{path}.index_topk", "sparse attention is not run", "0"
    yield mixer.q_lora_rank > 0, f"{path}.q_lora_rank", "queries of low rank are not run", "0"
    yield mixer.qk_norm is QkNorm.WIDTH, f"{path}.qk_norm", "a norm over all heads is not run", "none head"
    yield mixer.qk_head_dim % 2 > 0, f"{path}.head_dim", "rotary positions need an even width", "an even number"
    for name in ("qkv_bias", "out_bias", "output_gate", "head_gate", "key_is_value", "kv_from_below", "sink"):
        yield getattr(mixer, name), f"{path}.{name}", f"{name} is not run", "false"


def _plan_checks(model: Model, plan: Plan) -> Iterable[Check]:
    """Faults of axes and knobs."""
    yield plan.cp > 1, "--plan cp", f"context parallelism {plan.cp} is not run", "1"
    yield plan.pp == 1 < plan.vpp, "--plan vpp", f"{plan.vpp} chunks without pipeline stages are not run", "1"
    knobs = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.GPIPE)
    reason = f"schedule {schedule_text(plan.schedule)} is not run"
    yield plan.schedule not in knobs, "--plan schedule", reason, "1f1b interleaved gpipe"
    wrong = (plan.schedule == Schedule.INTERLEAVED) != (plan.vpp > 1)
    reason = f"schedule {schedule_text(plan.schedule)} does not go with vpp={plan.vpp}"
    yield wrong and plan.schedule in knobs, "--plan schedule", reason, "interleaved with vpp > 1, else 1f1b gpipe"
    reason = f"dispatcher {dispatcher_text(plan.dispatcher)} is not run"
    yield plan.dispatcher == Dispatcher.HYBRIDEP, "--plan dispatcher", reason, "allgather alltoall deepep"
    reason = f"recompute {recompute_text(plan.recompute)} is not run"
    yield plan.recompute not in (Recompute.NONE, Recompute.FULL), "--plan recompute", reason, "none full"
    tied = model.tied_embeddings and plan.pp > 1
    yield tied, "--plan pp", "tied embeddings on two pipeline stages are not run", "1 for this model"
    alone = plan.tp > 1 and not plan.sequence_parallel and model.moe is not None
    yield alone, "--plan sp", "experts behind tensor parallelism need sequence parallelism", "1"
    yield model.moe is None and plan.ep * plan.etp > 1, "--plan ep", "the model has no experts", "1"
    yield 0 in plan.layout.chunk_layers and plan.pp > 1, "--plan stage_layers", "empty stages are not run", "1 and more"


def _size_checks(model: Model, plan: Plan, settings: RunSettings) -> Iterable[Check]:
    """Faults of sizes that do not divide, and of the run's own settings."""
    yield settings.dtype not in DTYPES, "dtype", f"{settings.dtype!r} is not run", " ".join(DTYPES)
    yield settings.seq_len % plan.tp > 0, "--seq-len", f"tp={plan.tp} does not divide it", f"a multiple of {plan.tp}"
    few = plan.pp > 1 and plan.num_microbatches < plan.pp and plan.schedule != Schedule.GPIPE
    reason = f"{plan.num_microbatches} micro-batches cannot fill {plan.pp} stages"
    yield few, "--global-batch", reason, f"at least {plan.pp} micro-batches"
    rounds = max(1, plan.num_microbatches // plan.pp)
    uneven = plan.vpp > 1 and plan.num_microbatches % rounds > 0
    yield uneven, "--global-batch", "interleaving needs whole rounds of micro-batches", f"a multiple of {plan.pp}"
    group = plan.edp if model.moe is not None else plan.dp
    cut = plan.sharding == Sharding.HSDP and (plan.dp % settings.hsdp_replicas or group % settings.hsdp_replicas)
    reason = f"{settings.hsdp_replicas} replicas do not divide dp={plan.dp} and edp={plan.edp}"
    yield bool(cut), "--plan sharding", reason, "zero3, or replicas that divide both"
    yield from _shard_checks(model, plan, settings)
    padded = settings.pad_to_capacity and (settings.capacity_factor is None or plan.dispatcher != Dispatcher.ALLTOALL)
    yield padded, "--pad-to-capacity", "needs a capacity factor and the dispatcher alltoall", "false"


def _shard_checks(model: Model, plan: Plan, settings: RunSettings) -> Iterable[Check]:
    """Faults of shards that would be padded: the prediction counts no padding, and each parameter has such a width."""
    replicas = settings.hsdp_replicas if plan.sharding == Sharding.HSDP else 1
    groups = {"dp": plan.dp, **({"edp": plan.edp} if model.moe is not None else {})}
    widths = {model.hidden_size}
    mixers = (kind.mixer for kind in model.kinds)
    widths |= {mixer.qk_head_dim for mixer in mixers if isinstance(mixer, Attention) and mixer.qk_norm is QkNorm.HEAD}
    for name, group in groups.items():
        shards = max(1, group // replicas)
        uneven = sorted(width for width in widths if width % shards)
        reason = f"{shards} shards ({name}) would be padded: they do not divide {' '.join(map(str, uneven))}"
        bad = plan.sharding != Sharding.NONE and bool(uneven)
        yield bad, "--plan sharding", reason, f"none, or {name} that divides {math.gcd(*widths)}"


def _split_checks(kind: LayerKind, plan: Plan) -> Iterable[Check]:
    """Faults of widths that the plan's degrees do not divide."""
    sizes: list[tuple[str, str, int, int]] = []
    if isinstance(kind.mixer, Attention):
        sizes += [("tp", "query heads", kind.mixer.num_heads, plan.tp)]
        sizes += [("tp", "key heads", kind.mixer.num_kv_heads, plan.tp)]
    if isinstance(kind.ffn, MoeFfn):
        sizes += [("ep", "experts", kind.ffn.num_experts, plan.ep)]
        sizes += [("etp", "inner width of an expert", kind.ffn.expert_width, plan.etp)]
        sizes += [("tp", "width of shared experts", kind.ffn.shared_width, plan.tp)]
    if isinstance(kind.ffn, DenseFfn):
        sizes += [("tp", "width of the feed-forward", kind.ffn.width, plan.tp)]
    for axis, what, size, degree in sizes:
        yield size % degree > 0, f"--plan {axis}", f"{degree} does not divide {size} ({what})", f"a divisor of {size}"
