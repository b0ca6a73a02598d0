"""In which order FSDP and expert parallelism act on the experts: observed, not assumed."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ap_search.runtime.dispatch import DispatchContext, Dispatcher, ExpertInputs
from ap_search.runtime.experts import GroupedExperts


@dataclass(kw_only=True)
class _Watch:
    """Notes what happens to one layer's experts; gathered weights are plain tensors, FSDP's shards are not."""

    name: str
    experts: GroupedExperts
    events: list[str]
    gathered: bool = field(init=False)

    def __post_init__(self) -> None:
        self.gathered = self._is_gathered()

    def _is_gathered(self) -> bool:
        """Look at the parameters themselves."""
        return not any(hasattr(parameter, "placements") for parameter in self.experts.parameters())

    def look(self) -> None:
        """Note whether FSDP has gathered or freed the weights since the last look."""
        now = self._is_gathered()
        if now != self.gathered:
            self.events.append(f"{self.name} {'unshard' if now else 'reshard'}")
        self.gathered = now

    def note(self, event: str) -> None:
        """Note an event, after what came before it."""
        self.look()
        self.events.append(f"{self.name} {event}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedDispatcher:
    """A dispatcher that notes when it is called."""

    inner: Dispatcher
    watch: _Watch

    def dispatch(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[ExpertInputs, DispatchContext]:
        """Note, then dispatch."""
        self.watch.note("dispatch")
        return self.inner.dispatch(x, chosen, weights)

    def combine(self, outputs: Tensor, context: DispatchContext) -> Tensor:
        """Combine, then note."""
        out = self.inner.combine(outputs, context)
        self.watch.note("combine")
        return out


@contextmanager
def record_hook_order(experts: Mapping[str, GroupedExperts]) -> Iterator[list[str]]:
    """Record the events of the forwards inside the block.

    Parameters
    ----------
    experts : mapping of str to GroupedExperts
        By the name that events begin with, such as `Execution.experts()`.

    Yields
    ------
    list of str
        Grows: `layers.1 unshard`, `layers.1 dispatch`, `layers.1 combine`, `layers.1 reshard`; the first and the last
        only where FSDP holds the experts.
    """
    events: list[str] = []
    with ExitStack() as stack:
        for name, module in experts.items():
            _attach(stack, _Watch(name=name, experts=module, events=events))
        yield events


def _attach(stack: ExitStack, watch: _Watch) -> None:
    """Put a watched dispatcher in place and look before and after all hooks of the module; undone by the stack."""
    module, before = watch.experts, watch.experts.dispatcher

    def look(*_: Any) -> None:
        watch.look()

    for handle in (
        module.register_forward_pre_hook(look, prepend=True),
        module.register_forward_hook(look),
    ):
        stack.callback(handle.remove)
    module.dispatcher = _WatchedDispatcher(inner=before, watch=watch)
    stack.callback(setattr, module, "dispatcher", before)
