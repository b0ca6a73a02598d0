"""What a run fixes beside the model and the plan."""

from dataclasses import dataclass
from typing import Literal

DtypeName = Literal["float32", "float64", "bfloat16"]
DTYPES: tuple[DtypeName, ...] = ("float32", "float64", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """One run of a plan.

    Attributes
    ----------
    seq_len : int
        Tokens per sequence, a multiple of tp under sequence parallelism.
    seed : int
        Of weights and tokens; each parameter draws from a generator of its own, by its name.
    dtype : str
        Type of weights and activations: float32, float64 or bfloat16.
    learning_rate : float
        Of Adam.
    adam_epsilon : float
        Of Adam: well above the rounding noise of gradients that are zero, or that noise would become whole steps.
    capacity_factor : float or None
        Copies that each rank may send to an expert over the mean, None where nothing is dropped.
    pad_to_capacity : bool
        Whether each rank sends each expert exactly its capacity, zero rows included.
    hsdp_replicas : int
        Replicas of a hybrid sharded plan; each holds the weights once, sharded.
    vocab_divisor : int
        The embedding's rows are padded to a multiple of this times tp.
    """

    seq_len: int = 16
    seed: int = 0
    dtype: DtypeName = "float32"
    learning_rate: float = 1e-3
    adam_epsilon: float = 1e-6
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    hsdp_replicas: int = 2
    vocab_divisor: int = 128

    @property
    def router_dtype(self) -> DtypeName:
        """Type in which the router computes: at least float32."""
        return "float64" if self.dtype == "float64" else "float32"


def state_widths(settings: RunSettings, *, gathered: bool) -> tuple[int, int, int, int]:
    """Bytes per parameter that the runtime keeps, before sharding.

    Parameters
    ----------
    settings : RunSettings
        Its type of weights.
    gathered : bool
        Whether FSDP gathers the weights (ZeRO-3 and HSDP): its shards are the master weights.

    Returns
    -------
    tuple of int
        Of weights, gradients, master weights, and both moments together.
    """
    wide = 8 if settings.dtype == "float64" else 4
    narrow = settings.dtype == "bfloat16" and not gathered
    return 2 if narrow else wide, wide, wide if narrow else 0, 2 * wide
