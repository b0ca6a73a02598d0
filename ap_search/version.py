"""The version of this tool, in the one place that the packaging reads too."""

__version__ = "0.1.0"
