"""Sizes of a model that parallel axes must divide, each with its name."""

from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, LinearMixer, Model, MoeFfn

Divided = tuple[tuple[int, str], ...]
"""Sizes of a model that an axis must divide, each with its name."""


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
