"""Rewrite the regression files: `python -m tests.regression.update [MODEL ...]`; prints what changed."""

import sys
from collections.abc import Sequence

from tests.regression.snapshot import CASES, DEVICES, FOLDER, differences, file_of, recorded, snapshot, written

SHOWN = 6


def main(models: Sequence[str]) -> int:
    """Rewrite the files of the named models, or of all."""
    unknown = [name for name in models if name not in DEVICES]
    if unknown:
        print(f"no such case: {', '.join(unknown)} (legal: {' '.join(DEVICES)})", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    changed = [_rewrite(model, devices) for model, devices in CASES if not models or model in models]
    changed.append(_remove_strangers())
    print(f"{sum(changed)} files changed.")
    if any(changed):
        print("Say in one line of docs/changelog.md what moved the ranking, and why that is right.")
    return 0


def _rewrite(model: str, devices: int) -> bool:
    """Write one file; say what is new in it."""
    before, now = recorded(model, devices), snapshot(model, devices)
    found = [] if before is None else list(differences(before, now))
    if before is not None and not found:
        return False
    file_of(model, devices).write_text(written(now), encoding="utf-8")
    print(f"{file_of(model, devices).name}: {f'{len(found)} values' if before else 'new'}", flush=True)
    for line in found[:SHOWN]:
        print(f"  {line}")
    if len(found) > SHOWN:
        print(f"  ... and {len(found) - SHOWN} more")
    return True


def _remove_strangers() -> bool:
    """Remove files that belong to no case."""
    strangers = set(FOLDER.glob("*.yaml")) - {file_of(*case) for case in CASES}
    for path in sorted(strangers):
        path.unlink()
        print(f"{path.name}: removed")
    return bool(strangers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
