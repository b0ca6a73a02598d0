"""ap-search: which parallel strategy should train this model on this cluster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ap_search.version import __version__

if TYPE_CHECKING:
    from ap_search.api import (
        calibrate,
        calibrate_log,
        estimate,
        load_cluster,
        load_model,
        search,
        validate,
        validate_log,
        verify,
    )

__all__ = [
    "__version__",
    "calibrate",
    "calibrate_log",
    "estimate",
    "load_cluster",
    "load_model",
    "search",
    "validate",
    "validate_log",
    "verify",
]

# The (empty) subpackage first and out of sight: importing it later would hide the function of the same name.
import_module("ap_search.search")
del globals()["search"]


def __getattr__(name: str) -> Any:
    """Import the public functions on first use: `ap-search --help` waits for neither solver nor numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ap_search.api"), name)
