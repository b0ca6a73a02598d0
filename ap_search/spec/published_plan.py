"""The plan of a published run: its words for axes and knobs as the text that `--plan` takes."""

import re
from typing import TypeVar

from ap_search.spec.blocks import MoeFfn
from ap_search.spec.published_file import ExtraArgsRow, ParallelRow, PublishedRun
from ap_search.spec.run import CudaGraphs, Switches, Unusable, UnusableError

ValueT = TypeVar("ValueT", int, bool)

NATURAL_LOAD = "zipf:0.25"
RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
_SYNONYMS = {"rmsnorm": "layernorm", "core_attention": "core_attn"}
_LAYOUT = re.compile(r"layout (E[Etm*0-9()|,]*L)")
_VPP = re.compile(r"vpp ?=? ?(\d+)", re.IGNORECASE)
_NOT_MODELLED = re.compile(r"\bv-?(half|min)\b", re.IGNORECASE)
_ZERO_BUBBLE = re.compile(r"^(zb|zero-bubble)", re.IGNORECASE)
_COUNTS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
_CHUNKS = re.compile(rf"loss in ({'|'.join(_COUNTS[1:])}|[1-9][0-9]?) chunks")
_DROP = re.compile(r"(?:CF ?=? ?|capacity factor )([0-9.]+)", re.IGNORECASE)


def published_plan(row: PublishedRun, *, num_layers: int, moe: bool, assumed: list[str]) -> tuple[str, tuple[str, ...]]:
    """Write the plan of a published run, and the keys of it that the row does not state.

    Parameters
    ----------
    row : PublishedRun
        Its words.
    num_layers : int
        Decoder layers of its model.
    moe : bool
        Whether the model has routed experts.
    assumed : list of str
        One line is added per value that the row does not state.

    Returns
    -------
    tuple
        The plan as `--plan` takes it, and those of `mbs`, `recompute`, `vpp` that the row leaves open.

    Raises
    ------
    UnusableError
        When tp or pp is missing, or a word means something that is not modelled.

    Notes
    -----
    A1. Absent micro-batch, recomputation and virtual stages are unknown; other absent knobs are those of `--plan`.
    A2. Where layers do not divide by the stages but do with the embedding, the head or both counted as layers, the
    stages that hold those have one layer fewer.

    Source: Megatron-LM `arguments.py` (account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split).
    """
    axes = row.parallel
    if axes.tp is None or axes.pp is None:
        raise UnusableError(Unusable.SKIPPED, f"parallel.{'tp' if axes.tp is None else 'pp'} is missing")
    schedule, vpp = _schedule(axes, axes.pp, assumed)
    values: dict[str, object] = {"tp": axes.tp, "pp": axes.pp, "vpp": vpp}
    values["cp"] = _or_assume(axes.cp, 1, name="cp", assumed=assumed)
    values["mbs"] = row.micro_batch or 1
    if moe:
        values["ep"] = _or_assume(axes.ep, 1, name="ep", assumed=assumed)
        values["etp"] = axes.etp or 1
        if axes.etp is None and axes.tp > 1:
            assumed.append("etp: not stated, 1")
        exchanges = (axes.ep or 1) * (axes.etp or 1) > 1
        values["dispatcher"] = _dispatcher(axes, assumed) if exchanges else "alltoall"
    if axes.tp > 1:
        values["sp"] = int(_or_assume(axes.sequence_parallel, True, name="sequence_parallel", assumed=assumed))
    values |= {"sharding": _sharding(axes, assumed), "recompute": _recompute(row.recompute, assumed)}
    unknown = [] if row.micro_batch else ["mbs"]
    unknown += [] if row.recompute else ["recompute"]
    unknown += ["vpp"] if axes.pp > 1 and axes.vpp is None and axes.pp_schedule is None else []
    values["schedule"] = schedule
    layout = _layout(row, num_layers, vpp, assumed)
    if layout:
        values["stage_layers"] = layout
    return ",".join(f"{key}={value}" for key, value in values.items()), tuple(unknown)


def _or_assume(value: ValueT | None, usual: ValueT, *, name: str, assumed: list[str]) -> ValueT:
    """Give the stated value, or the usual one with a line that says so."""
    if value is None:
        assumed.append(f"{name}: not stated, {usual}")
        return usual
    return value


def _schedule(axes: ParallelRow, pp: int, assumed: list[str]) -> tuple[str, int]:
    """Word of the schedule, and virtual stages per stage."""
    words = axes.pp_schedule or ""
    written = _VPP.search(words)
    vpp = axes.vpp or (int(written[1]) if written else 1)
    if pp == 1:
        return "1f1b", 1
    if _NOT_MODELLED.search(words):
        raise UnusableError(Unusable.REFUSED, f"parallel.pp_schedule: {words} is not modelled")
    if "dualpipe" in words.lower():
        return "dualpipe", 1
    if _ZERO_BUBBLE.search(words):
        if words.lower().replace("-", "_") not in ("zb_h1", "zb_1p"):
            assumed.append(f"schedule: {words} is not modelled, priced as zb_h1")
        return "zb_h1", 1
    if "interleaved" in words.lower() and vpp == 1:
        raise UnusableError(Unusable.SKIPPED, "parallel.vpp is missing")
    return ("interleaved" if vpp > 1 else "1f1b"), vpp


def _sharding(axes: ParallelRow, assumed: list[str]) -> str:
    """Word of the sharding."""
    zero, fsdp = str(axes.zero or 0).lower(), axes.fsdp
    if fsdp or "params" in zero:
        return "zero3"
    if axes.zero is None:
        assumed.append("zero: not stated, zero1")
        return "zero1"
    stage = re.search(r"[0-3]", zero)
    if "grads" in zero or (stage and stage[0] == "2"):
        if (axes.pp or 1) > 1:
            # Sharded gradients would be reduced per micro-batch: with a pipeline trainers reduce them once per step.
            assumed.append(f"zero: {axes.zero} under a pipeline priced as zero1: gradients are reduced once per step")
            return "zero1"
        return "zero2"
    if "optim" in zero or stage is None:
        return "zero1"
    return "none" if stage[0] == "0" else f"zero{stage[0]}"


def _dispatcher(axes: ParallelRow, assumed: list[str]) -> str:
    """Word of the dispatcher; trainers that have several begin with all-to-all."""
    if axes.dispatcher is None:
        assumed.append("dispatcher: not stated, alltoall")
        return "alltoall"
    words = axes.dispatcher.lower().replace("-", "")
    known = [name for name in ("hybridep", "deepep", "allgather", "alltoall") if name in words]
    if not known:
        raise UnusableError(Unusable.REFUSED, f"parallel.dispatcher: {axes.dispatcher} is not modelled")
    return known[0]


def _recompute(words: str | None, assumed: list[str]) -> str:
    """Word of the recomputation; what stands after a semicolon is another opinion."""
    if words is None:
        return "none"
    said = words.split(";")[0].lower()
    if said.startswith("full"):
        if "block" in said:
            assumed.append(f"recompute: {words} priced as full")
        return "full"
    if not said.startswith("selective"):
        return "none"
    found = [_SYNONYMS.get(word, word) for word in re.findall(r"[a-z_]+", said.removeprefix("selective"))]
    modules = [module for module in RECOMPUTE_MODULES if module in found]
    if "moe" in modules:
        modules = [module for module in modules if module not in ("moe_act", "shared_experts")]
    if not modules:
        assumed.append("recompute: selective without modules, core_attn")
        modules = ["core_attn"]
    return "selective:" + "+".join(modules)


def _layout(row: PublishedRun, num_layers: int, vpp: int, assumed: list[str]) -> str:
    """Stage layout that the row states, or that counting embedding and head as layers gives; empty: none of these."""
    pp = row.parallel.pp or 1
    stated = row.overlap.pp_layout or next(iter(_LAYOUT.findall(row.notes)), "")
    if stated:
        return stated.replace(",", "")
    ends = row.parallel.extra_args
    if ends and ends.first_stage and ends.last_stage and pp > 2:
        middle = (num_layers - ends.first_stage - ends.last_stage) // (pp - 2)
        return f"{ends.first_stage}+{middle}x{pp - 2}+{ends.last_stage}"
    stages = pp * vpp
    if stages < 2 or num_layers % stages == 0:
        return ""
    for first, last, what in ((1, 1, "embedding and head"), (1, 0, "embedding"), (0, 1, "head")):
        each, rest = divmod(num_layers + first + last, stages)
        if rest == 0:
            assumed.append(f"stage_layers: not stated, {what} counted as layers")
            between = [f"{each}x{stages - 2}"] if stages > 2 else []
            return "+".join([str(each - first), *between, str(each - last)])
    return ""


def load(row: PublishedRun, moe: MoeFfn, assumed: list[str]) -> str:
    """How tokens fall on experts, as `--load` takes it: balanced, or the skew assumed of natural routing.

    A router whose scores carry a balancing bias (DeepSeek-V3) is taken as balanced.

    Source: `NATURAL_LOAD` has the smallest error on four pairs of runs that force balance and do not (Qwen3-235B on 256
    H100, yanring/Megatron-MoE-ModelZoo): 24, 21, 15 and 9 % slower at 16k to 128k tokens.
    """
    if not (row.routing or "").startswith("natural"):
        return "balanced"
    if moe.score_bias:
        assumed.append("load: natural routing with a balancing bias taken as balanced")
        return "balanced"
    assumed.append(f"load: natural routing taken as {NATURAL_LOAD}")
    return NATURAL_LOAD


def capacity_factor(row: PublishedRun, assumed: list[str]) -> float | None:
    """Capacity factor that the routing's words state; None is dropless."""
    words = row.routing or ""
    stated = _DROP.search(words)
    if stated:
        return float(stated[1])
    if "drop" in words.replace("dropless", ""):
        assumed.append("capacity_factor: not stated, 1")
        return 1.0
    return None


def switches(row: PublishedRun, assumed: list[str]) -> Switches:
    """What a row says of overlap and CUDA graphs."""
    said = row.overlap
    gather = said.param_gather if said.param_gather is not None else said.overlap_param_gather
    tensor = said.tp_comm if said.tp_comm is not None else said.async_tp
    for name in ("compile", "deterministic", "delay_wgrad"):
        if getattr(said, name):
            assumed.append(f"not modelled: overlap.{name}")
    return Switches(
        ep_overlap=said.moe_a2a,
        tp_overlap=tensor,
        dp_reduce_overlap=said.grad_reduce,
        dp_gather_overlap=gather,
        pp_overlap=said.p2p_overlap,
        cuda_graphs=_graphs(row),
        fused_attention=_fused_attention(row.parallel.extra_args),
        dropout=_dropout(row.parallel.extra_args, assumed),
        half_gradients=_half_gradients(row.precision.lower()),
        offloaded_layers=said.cpu_offloading_num_layers,
        loss_chunks=_loss_chunks(row.notes.lower()),
    )


def _fused_attention(args: ExtraArgsRow | None) -> bool | None:
    """Whether attention keeps its scores, where a recipe's arguments name its kernel."""
    return None if args is None or args.attention_backend is None else args.attention_backend != "unfused"


def _dropout(args: ExtraArgsRow | None, assumed: list[str]) -> bool | None:
    """Whether there is dropout; a list of a recipe's arguments that leaves it out means Megatron's default, 0.1."""
    if args is None:
        return None
    if args.hidden_dropout is None:
        assumed.append("dropout: not among the arguments, Megatron-LM's default of 0.1")
        return True
    return args.hidden_dropout > 0


def _loss_chunks(notes: str) -> int | None:
    """Pieces in which notes say that the loss is taken, as a word or a figure."""
    found = _CHUNKS.search(notes)
    if found is None:
        return None
    return _COUNTS.index(found[1]) if found[1] in _COUNTS else int(found[1])


def _half_gradients(words: str) -> bool | None:
    """Whether gradients are kept in fp16, as training in fp16 does; not said where another format may be meant."""
    return True if "fp16" in words and "bf16" not in words else None


def _graphs(row: PublishedRun) -> CudaGraphs | None:
    """What CUDA graphs capture, from the words for their maker and their scope."""
    maker, scope = row.overlap.cuda_graph, row.overlap.cuda_graph_scope
    if maker is None and not scope:
        return None
    if maker is False or maker == "none":
        return CudaGraphs.NONE
    words = " ".join([str(maker), *([scope] if isinstance(scope, str) else scope or ())])
    if "full_iteration" in words:
        return CudaGraphs.FULL
    attention, moe = "attn" in words, "moe" in words
    if attention and moe:
        return CudaGraphs.LAYER
    return CudaGraphs.ATTENTION if attention else CudaGraphs.MOE if moe else CudaGraphs.LAYER
