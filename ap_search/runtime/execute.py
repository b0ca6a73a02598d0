"""One training step of a plan on this rank."""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ap_search.plan.plan import Plan, Sharding
from ap_search.runtime.batch import Batch
from ap_search.runtime.cuts import Cut, initialise, named_cuts
from ap_search.runtime.experts import GroupedExperts, RoutingRecord
from ap_search.runtime.meshes import Meshes
from ap_search.runtime.moe import MoE
from ap_search.runtime.pipeline import Flights, Pipeline, StageShape, build_stages, run_alone
from ap_search.runtime.replicated import ReplicatedState
from ap_search.runtime.settings import RunSettings
from ap_search.runtime.sharded import ShardedState, ShardMeshes
from ap_search.runtime.state import ModelState, StateTensor
from ap_search.runtime.styles import ExpertParallel, ExpertTensorParallel, TensorParallel
from ap_search.runtime.support import check_supported
from ap_search.runtime.tensor import ALONE, TensorGroup, cross_entropy
from ap_search.runtime.transformer import Chunk, Shape
from ap_search.spec.blocks import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """What one rank sent in one forward of one MoE layer."""

    layer: int
    record: RoutingRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step gave on this rank.

    Attributes
    ----------
    loss : float
        This replica's share of the mean loss of the global batch, on the last stage; 0 elsewhere.
    logits : tuple of Tensor
        On the last stage one per micro-batch, shape (seq, mbs, vocabulary rows / tp); empty elsewhere.
    """

    loss: float
    logits: tuple[Tensor, ...]


@dataclass(kw_only=True)
class _Losses:
    """Collects what the last stage computes, in the order of micro-batches."""

    num_labels: int
    tensor: TensorGroup
    total: float = 0.0
    logits: list[Tensor] = field(default_factory=list)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Give a micro-batch's sum of token losses over the labels of the global batch."""
        loss = cross_entropy(logits, labels.t(), self.tensor).sum() / self.num_labels
        self.total += loss.item()
        self.logits.append(logits.detach().clone())
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A plan's part on this rank: the chunks it holds, and their gradients, weights and optimizer.

    A step is `forward_backward`, `finish_gradients`, `optimizer_step`, on every rank alike.
    """

    model: Model
    plan: Plan
    settings: RunSettings
    shape: Shape
    meshes: Meshes | None
    device: torch.device
    chunks: list[Chunk]
    cuts: dict[str, Cut]
    model_state: ModelState
    flights: Flights
    pipeline: Pipeline | None

    def forward_backward(self, batch: Batch) -> StepOutcome:
        """Run all micro-batches of this rank by the plan's schedule.

        Parameters
        ----------
        batch : Batch
            The whole global batch; this rank takes its replica's part.

        Returns
        -------
        StepOutcome
        """
        for experts in self.experts().values():
            experts.routing.clear()
        inputs, labels = (part.to(self.device) for part in batch.of(self._dp_index))
        tensor = _tensor_group(self.meshes, self.plan)
        losses = _Losses(num_labels=batch.num_labels, tensor=tensor)
        self.flights.start()
        if self.pipeline is None:
            run_alone(self.chunks[0], inputs, labels, loss=losses, flights=self.flights)
        else:
            self.pipeline.run(inputs, labels, loss=losses, flights=self.flights)
        return StepOutcome(loss=losses.total, logits=tuple(losses.logits))

    def finish_gradients(self) -> None:
        """Reduce what is reduced once per step; afterwards gradients are those of the global batch's mean loss."""
        self.model_state.finish_gradients()

    def gradients(self) -> dict[str, Tensor]:
        """Give finished gradients by name in the whole model: this rank's slice (`cuts`), whole over dp; collective."""
        return self.model_state.gradients()

    def weights(self) -> dict[str, Tensor]:
        """Give weights by name in the whole model: this rank's slice (`cuts`), whole over dp; collective."""
        return self.model_state.weights()

    def optimizer_step(self) -> None:
        """Run Adam, bring weights up to date on every rank, clear gradients."""
        self.model_state.update()

    def state(self) -> list[StateTensor]:
        """List the tensors that this rank keeps from step to step; moments exist after the first optimizer step."""
        return self.model_state.state()

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """List embedding, layers and head of this rank by name, for hooks that measure them."""
        found: list[tuple[str, nn.Module]] = []
        for chunk in self.chunks:
            found += [("embedding", chunk.embedding)] if chunk.embedding is not None else []
            found += [(f"layers.{number}", layer) for number, layer in chunk.layers.items()]
            found += [("head", chunk.head)] if chunk.head is not None else []
        return found

    def experts(self) -> dict[str, GroupedExperts]:
        """Routed experts of this rank by their layer's name, bottom to top."""
        parts = ((name, part) for name, block in self.blocks() for part in block.modules())
        return {name: part for name, part in parts if isinstance(part, GroupedExperts)}

    @property
    def routing(self) -> list[LayerRouting]:
        """What each MoE layer sent in the last `forward_backward`, layer by layer, forwards in order.

        Recompute's second forwards stand between the first ones.
        """
        return [
            LayerRouting(layer=int(name.removeprefix("layers.")), record=record)
            for name, experts in self.experts().items()
            for record in experts.routing
        ]

    @property
    def _dp_index(self) -> int:
        """Give the number of the replica that this rank works for."""
        return 0 if self.meshes is None else self.meshes.index("dp-cp")

    @property
    def in_flight_peak(self) -> tuple[tuple[int, ...], ...]:
        """Micro-batches in flight per chunk at the worst moments of the last `forward_backward`."""
        return self.flights.worst()


def build_execution(model: Model, plan: Plan, settings: RunSettings, *, device: str = "cpu") -> Execution:
    """Build this rank's part of a plan; every rank of the initialised process group calls it.

    Parameters
    ----------
    model : Model
        Sizes and kinds of layers.
    plan : Plan
        Its devices are the ranks of the default process group; a plan of one device needs none.
    settings : RunSettings
        Seed, types, sequence length.
    device : str
        `cpu`, `cuda` or `cuda:N`.

    Returns
    -------
    Execution
        With the initial weights that one process would draw, cut to this rank's part.

    Raises
    ------
    SpecError
        The runtime cannot run the model or the plan: every fault by name.
    """
    check_supported(model, plan, settings)
    place = torch.device(device)
    meshes = None
    if plan.dp * plan.tp * plan.cp * plan.pp > 1:
        assert dist.is_initialized(), "a plan of several devices needs an initialised process group"
        replicas = settings.hsdp_replicas if plan.sharding == Sharding.HSDP else 1
        meshes = Meshes.of(plan, device_type=place.type, hsdp_replicas=replicas)
    shape = Shape.of(model, plan, settings)
    chunks = _build_chunks(plan, shape, stage=meshes.index("pp") if meshes else 0)
    return _complete(model, plan, settings, shape=shape, meshes=meshes, device=place, chunks=chunks)


def build_single(model: Model, plan: Plan, settings: RunSettings, *, single: Plan) -> Execution:
    """Build the whole model in one process, as it stands for a plan: its padded vocabulary, its parts of the sequence.

    Parameters
    ----------
    model : Model
        Sizes and kinds of layers.
    plan : Plan
        What it stands for.
    settings : RunSettings
        Seed, types, sequence length.
    single : Plan
        The plan of one device that is run.

    Returns
    -------
    Execution
    """
    shape = Shape.of(model, plan, settings)
    chunks = _build_chunks(single, shape, stage=0)
    for part in chunks[0].modules():
        if isinstance(part, MoE):
            part.token_chunks = plan.tp if plan.sequence_parallel else 1
    return _complete(model, single, settings, shape=shape, meshes=None, device=torch.device("cpu"), chunks=chunks)


def _complete(
    model: Model, plan: Plan, settings: RunSettings, *, shape: Shape, meshes: Meshes | None, device: torch.device,
    chunks: list[Chunk],
) -> Execution:  # fmt: skip
    """Draw the weights, cut them, hand them to data parallelism."""
    for chunk in chunks:
        initialise(chunk, settings.seed)
        chunk.to(device)
        if meshes is not None:
            apply_styles(chunk, plan, meshes)
    cuts = {name: cut for chunk in chunks for name, cut in named_cuts(chunk).items()}
    state = _state(chunks, plan, settings, meshes)
    pipeline = None
    if plan.pp > 1 and meshes is not None:
        stage, group, between = meshes.index("pp"), meshes.groups["pp"], _stage_shape(plan, settings, shape)
        stages = build_stages(chunks, plan=plan, stage=stage, group=group, device=device, shape=between)
        pipeline = Pipeline(stages, plan)
    return Execution(
        model=model,
        plan=plan,
        settings=settings,
        shape=shape,
        meshes=meshes,
        device=device,
        chunks=chunks,
        cuts=cuts,
        model_state=state,
        flights=Flights(num_microbatches=plan.num_microbatches, state=state, chunks=len(chunks)),
        pipeline=pipeline,
    )


def _stage_shape(plan: Plan, settings: RunSettings, shape: Shape) -> StageShape:
    """Give the shapes of what goes over the pipeline."""
    seq, mbs = settings.seq_len, plan.mbs
    local = seq // plan.tp if plan.sequence_parallel else seq
    return StageShape(
        tokens=(mbs, seq),
        hidden=(local, mbs, shape.model.hidden_size),
        logits=(seq, mbs, shape.vocab_rows // plan.tp),
        dtype=shape.dtype,
    )


def _build_chunks(plan: Plan, shape: Shape, *, stage: int) -> list[Chunk]:
    """Make the chunks of one pipeline stage."""
    starts = [0, *accumulate(plan.layout.chunk_layers)]
    last = plan.pp * plan.vpp - 1
    numbers = [c * plan.pp + stage for c in range(plan.vpp)]
    return [Chunk(shape, range(starts[n], starts[n + 1]), first=n == 0, last=n == last) for n in numbers]


def apply_styles(chunk: Chunk, plan: Plan, meshes: Meshes) -> None:
    """Cut dense parts over tp and experts over ep and etp.

    Parameters
    ----------
    chunk : Chunk
        With whole parameters.
    plan : Plan
        Its degrees, dispatcher and sequence parallelism.
    meshes : Meshes
        This rank's groups.
    """
    TensorParallel(sequence_parallel=plan.sequence_parallel).apply(chunk, meshes.mesh("tp"))
    for part in chunk.modules():
        if isinstance(part, GroupedExperts):
            if plan.etp > 1:
                both = meshes.process("tp-ep")
                ExpertTensorParallel(dispatcher=plan.dispatcher, both=both).apply(part, meshes.expert_mesh())
            else:
                ExpertParallel(dispatcher=plan.dispatcher).apply(part, meshes.mesh("ep"))


def _state(chunks: list[Chunk], plan: Plan, settings: RunSettings, meshes: Meshes | None) -> ModelState:
    """Hand the parameters to data parallelism as the plan shards them."""
    tp = meshes.process("tp") if meshes else None
    if plan.sharding in (Sharding.ZERO3, Sharding.HSDP) and meshes is not None:
        if plan.sharding == Sharding.HSDP:
            replicas = settings.hsdp_replicas
            pair = (meshes.hybrid_mesh("dp-cp", replicas), meshes.hybrid_mesh("edp", replicas))
        else:
            pair = (meshes.mesh("dp-cp"), meshes.mesh("edp"))
        return ShardedState(chunks, meshes=ShardMeshes(dense=pair[0], expert=pair[1]), tp=tp, settings=settings)
    sharding = plan.sharding if plan.sharding in (Sharding.ZERO1, Sharding.ZERO2) else Sharding.NONE
    return ReplicatedState(
        [*chunks],
        sharding=sharding,
        dense=meshes.process("dp-cp") if meshes else None,
        expert=meshes.process("edp") if meshes else None,
        tp=tp,
        settings=settings,
    )


def _tensor_group(meshes: Meshes | None, plan: Plan) -> TensorGroup:
    """Give the group that splits the vocabulary."""
    if meshes is None or meshes.process("tp") is None:
        return ALONE
    return TensorGroup(
        process=meshes.process("tp"), rank=meshes.index("tp"), size=plan.tp, sequence_parallel=plan.sequence_parallel
    )
