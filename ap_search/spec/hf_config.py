"""A Hugging Face configuration as answers to what keys mean, with every fault and every used key remembered."""

import re
from collections.abc import Mapping

from ap_search.errors import Fault, SpecError
from ap_search.spec.hf_facts import DEFAULTS, FACTS, FAMILY_ALIASES
from ap_search.spec.hf_keys import (
    EXPERTS,
    HARMLESS,
    NESTED_BLOCKS,
    REFUSED,
    REFUSED_FAMILIES,
    SHAPED,
    SPELLINGS,
    SUSPECT,
    TEXT_BLOCKS,
    TOWERS,
)
from ap_search.spec.reader import describe, short

MAX_COUNT = 2**31 - 1
_OUTER_KEYS = {"architectures", "model_type", *SPELLINGS["tied"], *SPELLINGS["vocab_size"], *SPELLINGS["stated_total"]}


class HfConfig:
    """Answers by meaning; a fault found on the way is kept until `raise_faults`, so that all are told at once.

    Attributes
    ----------
    family : str
        `model_type` without underscores, dashes, dots and a trailing `text`; facts of an architecture go by it.
    layers : int
        Decoder layers, once they are known.
    warnings : list of str
        What was ignored or contradicts itself, one line each.
    """

    def __init__(self, data: Mapping[str, object], where: str) -> None:
        self._where = where
        self._values = _flatten(data)
        self._used: set[str] = set()
        self._faults: list[Fault] = []
        self.layers = 0
        self.warnings: list[str] = []
        self.family = _family(self._values)

    def fact(self, name: str) -> bool:
        """Whether the architecture has a property that no key states."""
        return self.family in FACTS[name]

    def fail(self, key: str, reason: str, legal: str = "") -> None:
        """Keep a fault."""
        fault = Fault(path=f"{self._where}: {key}", reason=reason, legal=legal)
        if fault not in self._faults:
            self._faults.append(fault)

    def raise_faults(self) -> None:
        """Raise all faults kept so far, if any."""
        if self._faults:
            raise SpecError.of(self._faults)

    def find(self, meaning: str) -> tuple[str, object] | None:
        """Find the first present key of a meaning and its value (not null or `auto`); warn of contradictions."""
        present = [key for key in SPELLINGS[meaning] if self._values.get(key) not in (None, "auto")]
        self._used.update(key for key in SPELLINGS[meaning] if key in self._values)
        if not present:
            return None
        value = self._values[present[0]]
        others = [key for key in present[1:] if self._values[key] != value]
        for other in others:
            line = (
                f"{other} = {short(self._values[other])} contradicts {present[0]} = {short(value)}; the latter is read"
            )
            if meaning != "max_positions" and line not in self.warnings:
                self.warnings.append(line)
        return present[0], value

    def has(self, meaning: str) -> bool:
        """Whether any key of a meaning is present."""
        return self.find(meaning) is not None

    def key(self, meaning: str) -> str:
        """Name the key that spells a meaning in this file, or its usual spelling."""
        found = self.find(meaning)
        return found[0] if found else SPELLINGS[meaning][0]

    def count(self, meaning: str, default: int | None = None, low: int = 1) -> int:
        """Read a whole number of at least `low`; required where neither file, architecture nor caller has it."""
        found = self.find(meaning)
        if found:
            return self._whole(found[0], found[1], low)
        fallback = DEFAULTS.get(self.family, {}).get(meaning, default)
        if fallback is None:
            usual = meaning if meaning in SPELLINGS[meaning] else SPELLINGS[meaning][0]
            self.fail(usual, "is required and missing", f"any of {', '.join(SPELLINGS[meaning])}")
            return low
        return fallback

    def maybe_count(self, meaning: str, low: int = 0) -> int:
        """Read a whole number of at least `low`, 0 where absent."""
        return self.count(meaning, 0, low)

    def flag(self, meaning: str, default: bool) -> bool:
        """Read a switch."""
        found = self.find(meaning)
        if not found:
            return default
        if not isinstance(found[1], bool):
            self.fail(found[0], f"is {describe(found[1])}", "true or false")
            return default
        return found[1]

    def text(self, meaning: str) -> str:
        """Read a word, empty where absent or not a word."""
        found = self.find(meaning)
        return found[1] if found and isinstance(found[1], str) else ""

    def count_at(self, meaning: str, layer: int, default: int | None = None) -> int:
        """Read the number that a layer has of a meaning that may be a number or a list with one entry per layer.

        Positive and required where there is no default, like `count`.
        """
        low = 1 if default is None else 0
        found = self.find(meaning)
        if found and isinstance(found[1], list):
            value = self.counts(meaning, self.layers)[layer]
            return self._whole(f"{found[0]}[{layer}]", value, low)
        return self.count(meaning, default, low)

    def counts(self, meaning: str, layers: int, default: int = 0) -> list[int]:
        """Read a number per layer: one number stands for all, a list needs one entry per layer (or a single entry)."""
        found = self.find(meaning)
        if not found or not isinstance(found[1], list):
            return [self.count(meaning, default, 0)] * layers
        entries = [int(value) if isinstance(value, bool) else value for value in found[1]]
        values = [self._whole(f"{found[0]}[{i}]", value, 0) for i, value in enumerate(entries)]
        return self.fit(found[0], values * layers if len(values) == 1 else values, layers)

    def numbers(self, meaning: str) -> list[int] | None:
        """Read a list of whole numbers (or text `4,5,6`), None where absent."""
        found = self.find(meaning)
        if not found:
            return None
        key, value = found
        if isinstance(value, str):
            value = [int(part) if part.strip().isdigit() else part for part in value.split(",")]
        if not isinstance(value, list):
            self.fail(key, f"is {describe(value)}", "a list of whole numbers")
            return None
        return [self._whole(f"{key}[{i}]", entry, 0) for i, entry in enumerate(value)]

    def fit(self, key: str, values: list[int], layers: int) -> list[int]:
        """Check one entry per layer; entries for the multi-token-prediction modules may follow."""
        if len(values) not in (layers, layers + self.maybe_count("mtp_layers")):
            self.fail(key, f"has {len(values)} entries", f"{layers}, one per layer")
            return (values + [0] * layers)[:layers]
        return values[:layers]

    def _whole(self, key: str, value: object, low: int) -> int:
        """Check one whole number."""
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(whole, bool) or not isinstance(whole, int):
            self.fail(key, f"is {describe(value)}", "a whole number")
            return low
        if not low <= whole <= MAX_COUNT:
            self.fail(key, f"is {short(whole)}", f"{low} to {MAX_COUNT}")
            return low
        return whole

    def refuse_unknown(self) -> None:
        """Refuse structures that are not modelled, by the name of their key."""
        if self.family in REFUSED_FAMILIES:
            self.fail("model_type", f"{self._values.get('model_type')!r} is an architecture that is not modelled")
        for key, reason in REFUSED.items():
            value = self._values.get(key)
            if value and value != self._values.get("hidden_size"):
                self.fail(key, reason)

    def refuse_unused(self) -> None:
        """Refuse keys left over that look like another mixer or unread experts; warn of those that may shape layers."""
        left = sorted(key for key, value in self._values.items() if _is_left(value) and key not in self._used)
        left = [key for key in left if key not in HARMLESS and key not in REFUSED]
        for key in left:
            if re.search(SUSPECT, key):
                self.fail(key, "looks like a layer that is not modelled, and is not read")
            elif re.search(EXPERTS, key) and not any(known in self._values for known in SPELLINGS["num_experts"]):
                self.fail(
                    key, "looks like experts, but no number of experts was found", ", ".join(SPELLINGS["num_experts"])
                )
        shaped = [key for key in left if re.search(SHAPED, key) or isinstance(self._values[key], dict)]
        ignored = [key for key in shaped if not re.search(TOWERS, key)]
        if ignored:
            self.warnings.append(f"keys that were not understood and are ignored: {', '.join(ignored)}")


def _is_left(value: object) -> bool:
    """Whether a value says something: null, false, zero and empty ones do not, nor do words."""
    return bool(value) and not isinstance(value, str)


def _flatten(data: Mapping[str, object]) -> dict[str, object]:
    """Lay the language model's block over the wrapper, and known nested blocks as dotted keys."""
    flat = dict(data)
    block = next((name for name in TEXT_BLOCKS if isinstance(data.get(name), dict)), None)
    if block:
        inner = flat.pop(block)
        assert isinstance(inner, dict)
        outer = {key: value for key, value in flat.items() if key in _OUTER_KEYS}
        flat = {**outer, **_flatten(inner)}
    for name in NESTED_BLOCKS:
        inner = flat.get(name)
        if isinstance(inner, dict):
            del flat[name]
            flat.update({f"{name}.{key}": value for key, value in inner.items()})
    return flat


def _family(values: Mapping[str, object]) -> str:
    """Find the family of the architecture: of `model_type`, or else of the first of `architectures`."""
    named = values.get("model_type")
    if not named:
        listed = values.get("architectures")
        first = listed[0] if isinstance(listed, list) and listed else ""
        named = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$", "", str(first))
    family = re.sub(r"[^a-z0-9]", "", str(named).lower()).removesuffix("text")
    return FAMILY_ALIASES.get(family, family)
