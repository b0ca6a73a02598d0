"""All rules in one list, in the order of explanation: a dropped plan counts under the first rule that it breaks.

The list feeds the solver, the brute-force oracle of the tests, the explanation of an empty result and the dialects of
the target frameworks.
"""

from ap_search.search.rules.base import Rule
from ap_search.search.rules.kernels import KERNEL_DISPATCHER_RULES, KERNEL_MESH_RULES, KERNEL_RECOMPUTE_RULES
from ap_search.search.rules.mesh import MESH_RULES
from ap_search.search.rules.pipeline import BATCH_RULES, PIPELINE_RULES
from ap_search.search.rules.state import DISPATCHER_RULES, RECOMPUTE_RULES, SHARDING_RULES
from ap_search.search.rules.target import (
    TARGET_DISPATCHER_RULES,
    TARGET_MESH_RULES,
    TARGET_PIPELINE_RULES,
    TARGET_RECOMPUTE_RULES,
    TARGET_SHARDING_RULES,
)

RULES: tuple[Rule, ...] = (
    *MESH_RULES,
    *KERNEL_MESH_RULES,
    *TARGET_MESH_RULES,
    *BATCH_RULES,
    *PIPELINE_RULES,
    *TARGET_PIPELINE_RULES,
    *SHARDING_RULES,
    *TARGET_SHARDING_RULES,
    *DISPATCHER_RULES,
    *KERNEL_DISPATCHER_RULES,
    *TARGET_DISPATCHER_RULES,
    *RECOMPUTE_RULES,
    *KERNEL_RECOMPUTE_RULES,
    *TARGET_RECOMPUTE_RULES,
)

MEMORY_LIMIT_ID = "memory_limit"
MEMORY_LIMIT_SENTENCE = "the largest stage at its worst moment, with the reserve, fits into the memory of one device"
MEMORY_LIMIT_SOURCE = "EP estimation requirement 001, section 3.3; decided after pricing, not by integers"
