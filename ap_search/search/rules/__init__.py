"""Rules as objects: one list, and what is asked of it (which plans hold, what a plan breaks, what a search dropped)."""

from ap_search.search.rules.base import MESH_AXES, STAGES, MeshPoster, Rule, RuleContext, applicable
from ap_search.search.rules.every import MEMORY_LIMIT_ID, MEMORY_LIMIT_SENTENCE, MEMORY_LIMIT_SOURCE, RULES
from ap_search.search.rules.judge import Dropped, RuleMatrix, check, explain, rejections, violations

__all__ = [
    "MEMORY_LIMIT_ID",
    "MEMORY_LIMIT_SENTENCE",
    "MEMORY_LIMIT_SOURCE",
    "MESH_AXES",
    "RULES",
    "STAGES",
    "Dropped",
    "MeshPoster",
    "Rule",
    "RuleContext",
    "RuleMatrix",
    "applicable",
    "check",
    "explain",
    "rejections",
    "violations",
]
