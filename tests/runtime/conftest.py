"""What each module's ranks found: its processes are started once."""

from typing import Any

import pytest

from tests.runtime.ranks import run_module


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """What every rank returned from each `rank_...` function of the module."""
    return run_module(request.module.__name__)
