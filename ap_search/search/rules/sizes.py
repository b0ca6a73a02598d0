"""Sizes of a model that parallel axes must divide, each with its name."""

from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, LinearMixer, Model, MoeFfn

Divided = tuple[tuple[int, str], ...]
"""Sizes of a model that an axis must divide, each with its name."""

Sliced = tuple[int, str | None, str]
"""A width, the axis that cuts it (None: it is whole on every rank), and its name."""


def heads(model: Model) -> Divided:
    """Query heads of every attention kind, and heads of mixers without softmax."""
    mixers = [kind.mixer for kind in model.kinds]
    queries = [(mixer.num_heads, "query heads") for mixer in mixers if isinstance(mixer, Attention)]
    scans = [(mixer.heads, f"{mixer.name} heads") for mixer in mixers if isinstance(mixer, LinearMixer)]
    return tuple(dict.fromkeys(queries + scans))


def kv_heads(model: Model) -> Divided:
    """Key/value heads of every attention kind that has them (MLA expands its own per query head)."""
    mixers = [kind.mixer for kind in model.kinds if isinstance(kind.mixer, Attention)]
    shared = [(mixer.num_kv_heads, "key/value heads") for mixer in mixers if mixer.kind is AttentionKind.GQA]
    return tuple(dict.fromkeys(shared))


def moe_kinds(model: Model) -> tuple[MoeFfn, ...]:
    """Every distinct kind of routed experts."""
    return tuple(dict.fromkeys(kind.ffn for kind in model.kinds if isinstance(kind.ffn, MoeFfn)))


def hidden(model: Model) -> Divided:
    """Hidden size of the residual stream."""
    return ((model.hidden_size, "hidden size"),)


def ffn_widths(model: Model) -> Divided:
    """Widths of the dense feed-forwards."""
    widths = [kind.ffn.width for kind in model.kinds if isinstance(kind.ffn, DenseFfn)]
    return tuple((width, "dense feed-forward width") for width in dict.fromkeys(widths))


def shared_widths(model: Model) -> Divided:
    """Total widths of the shared experts."""
    widths = [moe.shared_width for moe in moe_kinds(model) if moe.shared_width]
    return tuple((width, "shared-expert width") for width in dict.fromkeys(widths))


def experts(model: Model) -> Divided:
    """Numbers of routed experts."""
    return tuple((moe.num_experts, "experts") for moe in moe_kinds(model))


def expert_widths(model: Model) -> Divided:
    """Hidden widths of one routed expert."""
    return tuple((moe.expert_width, "expert hidden width") for moe in moe_kinds(model))


def product_widths(model: Model) -> tuple[Sliced, ...]:
    """Inner widths of the products that run in the job's precision (router and head do not)."""
    widths: list[Sliced] = [(model.hidden_size, None, "hidden size")]
    for kind in model.kinds:
        widths += _mixer_widths(kind.mixer) + _ffn_widths(kind.ffn)
    return tuple(dict.fromkeys(one for one in widths if one[0]))


def _mixer_widths(mixer: Attention | LinearMixer | None) -> list[Sliced]:
    """Inner widths of a mixer's projections, 0 where it has none of a kind."""
    if isinstance(mixer, Attention):
        return [
            (mixer.num_heads * mixer.v_head_dim, "tp", "width of the heads' output"),
            (mixer.q_lora_rank, None, "query rank"),
            (mixer.kv_lora_rank, None, "key/value rank"),
        ]
    return [(mixer.out_width, "tp", f"{mixer.name} output width")] if mixer else []


def _ffn_widths(ffn: DenseFfn | MoeFfn | None) -> list[Sliced]:
    """Inner widths of a feed-forward's products, 0 where it has none of a kind."""
    if isinstance(ffn, DenseFfn):
        return [(ffn.width, "tp", "dense feed-forward width")]
    if ffn is None:
        return []
    return [
        (ffn.expert_width, "etp", "expert hidden width"),
        (ffn.shared_width, "tp", "shared-expert width"),
        (ffn.latent_width, None, "latent width"),
    ]


def context_parallel_faults(model: Model) -> tuple[str, ...]:
    """What of a model's layers the ring of context parallelism cannot take, each once."""
    faults: list[str] = []
    for kind in model.kinds:
        if isinstance(kind.mixer, LinearMixer):
            faults.append(f"{kind.mixer.name} scans")
        elif kind.mixer is not None:
            named = ((kind.mixer.window, "windows"), (kind.mixer.index_topk, "picked keys"), (kind.mixer.sink, "sinks"))
            faults += [name for present, name in named if present]
    return tuple(dict.fromkeys(faults))
