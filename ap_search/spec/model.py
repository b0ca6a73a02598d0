"""Loading a model: a preset's name, our YAML, or a Hugging Face configuration."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ap_search.errors import Fault, SpecError
from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, LayerKind, Model, MoeFfn, QkNorm
from ap_search.spec.hf import is_hf, read_hf
from ap_search.spec.model_file import AttentionFile, ModelFile, MoeFile, SlidingFile
from ap_search.spec.presets import locate
from ap_search.spec.reader import read_mapping, validate
from ap_search.spec.stated import check_stated, parse_figure


def load_model(source: str | Path) -> Model:
    """Load a model.

    Parameters
    ----------
    source : str or Path
        A preset's name (in any case, or the unique beginning of one), or a path to our YAML, to a Hugging Face
        `config.json` (told apart by their keys), or to a folder that holds one.

    Returns
    -------
    Model
        The model; `warnings` says what was ignored and where a stated size contradicts the count.

    Raises
    ------
    SpecError
        With every fault found in the file.
    """
    path = locate("models", source)
    if (path / "config.json").is_file():
        path = path / "config.json"
    data = read_mapping(path)
    if is_hf(data):
        return read_hf(data, name=_name_of(path), where=path.name)
    return read_model_file(data, name=_name_of(path), where=path.name)


def _name_of(path: Path) -> str:
    """Name a model after its file, or after the folder of a file that is only called `config`."""
    return path.resolve().parent.name if path.stem == "config" else path.stem


def read_model_file(data: Mapping[str, object], *, name: str, where: str) -> Model:
    """Read a model from the content of our own YAML.

    Parameters
    ----------
    data : mapping
        The file's content.
    name : str
        Name where the file gives none.
    where : str
        The file's name, the head of each fault's path.

    Returns
    -------
    Model
        The model.

    Raises
    ------
    SpecError
        With every fault: path into the file, reason, legal values.
    """
    file = validate(ModelFile, data, where)
    faults = [*_attention_faults(file), *_moe_faults(file), *_published_faults(file)]
    if faults:
        raise SpecError.of(replace(fault, path=f"{where}: {fault.path}") for fault in faults)
    built = [_layer(file, i) for i in range(file.num_layers)]
    kinds = tuple(dict.fromkeys(built))
    model = Model(
        name=file.name or name,
        hidden_size=file.hidden_size,
        vocab_size=file.vocab_size,
        tied_embeddings=file.tied_embeddings,
        kinds=kinds,
        layers=tuple(kinds.index(kind) for kind in built),
        mtp_layers=file.mtp_layers,
        norm_params_per_element=1 if file.norm == "rmsnorm" else 2,
        learned_positions=file.learned_positions,
        max_positions=file.max_positions,
        head_bias=file.head_bias,
        sources=tuple(file.sources),
    )
    return check_stated(model, "published.params_total", file.published.params_total) if file.published else model


def _layer(file: ModelFile, i: int) -> LayerKind:
    """Build layer i."""
    sliding = file.sliding if file.sliding and file.sliding.pattern[i % len(file.sliding.pattern)] else None
    ffn: DenseFfn | MoeFfn | None = None
    if file.moe and _is_moe(file.moe, i):
        ffn = _moe(file.moe)
    elif file.ffn:
        ffn = DenseFfn(width=file.ffn.width, gated=file.ffn.gated, bias=file.ffn.bias)
    return LayerKind(mixer=_attention(file, sliding), ffn=ffn, num_norms=file.num_norms)


def _is_moe(moe: MoeFile, i: int) -> bool:
    """Whether layer i holds experts."""
    if moe.layer_pattern is not None:
        return bool(moe.layer_pattern[i])
    return i >= moe.first_dense_layers and (i + 1) % moe.every == 0


def _attention(file: ModelFile, sliding: SlidingFile | None) -> Attention:
    """Build attention, with what sliding layers have of their own."""
    given = file.attention
    own = sliding.model_dump(exclude_none=True, exclude={"pattern"}) if sliding else {}
    merged = given.model_copy(update=own)
    is_mla = merged.kind == "mla"
    qk_head_dim = _qk_head_dim(file, merged)
    return Attention(
        kind=AttentionKind(merged.kind),
        num_heads=merged.num_heads,
        num_kv_heads=merged.num_heads if is_mla else merged.num_kv_heads or merged.num_heads,
        qk_head_dim=qk_head_dim,
        v_head_dim=merged.v_head_dim or qk_head_dim,
        q_lora_rank=merged.q_lora_rank,
        kv_lora_rank=merged.kv_lora_rank,
        qk_rope_head_dim=merged.qk_rope_head_dim,
        window=merged.window,
        qkv_bias=merged.qkv_bias,
        out_bias=merged.out_bias,
        qk_norm=QkNorm(merged.qk_norm),
        output_gate=merged.output_gate,
        sink=merged.sink,
        index_heads=merged.index_heads,
        index_head_dim=merged.index_head_dim,
        index_topk=merged.index_topk,
    )


def _qk_head_dim(file: ModelFile, given: AttentionFile) -> int:
    """Width of a query head."""
    if given.kind == "mla":
        return given.qk_nope_head_dim + given.qk_rope_head_dim
    return given.head_dim or max(1, file.hidden_size // given.num_heads)


def _moe(moe: MoeFile) -> MoeFfn:
    """Build a layer's experts."""
    own = {"first_dense_layers", "every", "layer_pattern"}
    return MoeFfn(**moe.model_dump(exclude=own), shared_gated=moe.gated)


def _attention_faults(file: ModelFile) -> list[Fault]:
    """Faults between the fields of attention."""
    given, faults = file.attention, []
    if given.kind == "mla":
        needed = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        faults += [
            Fault(path=f"attention.{key}", reason="is required for mla") for key in needed if not getattr(given, key)
        ]
        if file.sliding:
            faults.append(Fault(path="sliding", reason="is modelled for gqa only"))
        return faults
    if given.head_dim is None and file.hidden_size % given.num_heads:
        reason = f"{given.num_heads} heads do not divide hidden_size {file.hidden_size}, and head_dim is not given"
        faults.append(Fault(path="attention.num_heads", reason=reason))
    for path, block in (("attention", given), ("sliding", file.sliding)):
        heads = (block and block.num_heads) or given.num_heads
        kv_heads = (block and block.num_kv_heads) or given.num_kv_heads or heads
        if heads % kv_heads:
            reason = f"{kv_heads} key heads do not divide {heads} query heads"
            faults.append(Fault(path=f"{path}.num_kv_heads", reason=reason))
    return faults


def _moe_faults(file: ModelFile) -> list[Fault]:
    """Faults of the experts and of which layers are dense."""
    moe, faults = file.moe, []
    dense = "layers are dense, so ffn is required"
    if moe is None:
        return [] if file.ffn else [Fault(path="ffn", reason=f"is missing: all {dense}")]
    if moe.top_k > moe.num_experts:
        legal = f"1 to {moe.num_experts}"
        faults.append(Fault(path="moe.top_k", reason=f"is {moe.top_k} of {moe.num_experts} experts", legal=legal))
    if moe.num_experts % moe.num_groups:
        reason = f"{moe.num_groups} groups do not divide {moe.num_experts} experts"
        faults.append(Fault(path="moe.num_groups", reason=reason))
    if moe.layer_pattern is not None and len(moe.layer_pattern) != file.num_layers:
        legal = f"{file.num_layers}, one per layer"
        faults.append(Fault(path="moe.layer_pattern", reason=f"has {len(moe.layer_pattern)} entries", legal=legal))
        return faults
    chosen = [_is_moe(moe, i) for i in range(file.num_layers)]
    if not any(chosen):
        faults.append(Fault(path="moe", reason="no layer holds experts"))
    if not all(chosen) and file.ffn is None:
        faults.append(Fault(path="ffn", reason=f"is missing: {chosen.count(False)} {dense}"))
    return faults


def _published_faults(file: ModelFile) -> list[Fault]:
    """Faults of published figures."""
    if not file.published:
        return []
    figures = (("params_total", file.published.params_total), ("params_active", file.published.params_active))
    return [
        Fault(path=f"published.{key}", reason=f"is {written!r}", legal="such as 671B, 46.7B, 1T or a whole number")
        for key, written in figures
        if written is not None and parse_figure(written) is None
    ]
