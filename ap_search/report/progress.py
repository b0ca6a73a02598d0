"""Progress of long work, on stderr and only for a person who watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, float], None]
"""Takes what is being done and the share of the whole that is done, 0..1."""


@contextmanager
def shown_progress() -> Iterator[Report | None]:
    """Show a bar on stderr while the block runs and wipe it afterwards; None where stderr is not a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)
    with bar:
        task = bar.add_task("reading", total=1.0)

        def report(stage: str, done_ratio: float) -> None:
            bar.update(task, description=stage, completed=done_ratio)

        yield report
