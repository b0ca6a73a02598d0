"""Limits that the command line and the Python functions share."""

import pytest

from ap_search import cli_flags, limits, search
from ap_search.errors import SpecError


def test_the_command_and_the_function_take_as_many_plans() -> None:
    assert cli_flags.HIGHEST["top"] == limits.MAX_TOP
    with pytest.raises(SpecError, match=rf"--top: .* \(legal: 1 to {limits.MAX_TOP}\)"):
        search(model="toy-moe", devices=8, top=limits.MAX_TOP + 1)
