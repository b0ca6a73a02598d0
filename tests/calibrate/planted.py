"""Recorded runs that never were: priced by `estimate` under constants that a test plants, and written as files."""

import json
from pathlib import Path
from typing import Any

from ap_search import estimate
from ap_search.spec.calibrated import cluster_content, software_content, yaml_text
from ap_search.spec.constants import CONSTANTS, moved

JOBS: tuple[dict[str, Any], ...] = (
    {"model": "llama-3.1-8b", "devices": 8, "global_batch": 64, "seq_len": 4096, "group": "llama-4k"},
    {"model": "llama-3.1-8b", "devices": 8, "global_batch": 16, "seq_len": 32768, "group": "llama-32k"},
    {"model": "qwen3-30b-a3b", "devices": 32, "global_batch": 256, "seq_len": 4096, "group": "qwen"},
    {"model": "mixtral-8x7b", "devices": 32, "global_batch": 256, "seq_len": 4096, "group": "mixtral"},
)
PLANS = {
    "llama-4k": ("tp=2,pp=2", "tp=4", "tp=1,pp=4,recompute=full", "tp=2,recompute=full"),
    "llama-32k": ("tp=8", "tp=4,cp=2", "tp=2,cp=4,recompute=full", "tp=8,recompute=full"),
    "qwen": ("tp=1,pp=4,ep=8", "tp=1,pp=2,ep=8,recompute=full", "tp=2,pp=4,ep=4", "tp=1,pp=4,ep=4,mbs=2"),
    "mixtral": ("tp=2,pp=4,ep=4", "tp=2,pp=2,ep=8", "tp=4,pp=4,ep=2", "tp=2,pp=4,ep=4,recompute=full"),
}
CLUSTER, SOFTWARE = "h100-sxm", "default"


def planted_files(folder: Path, gains: dict[str, float]) -> tuple[Path, Path]:
    """Write cluster and profile with some constants moved by logarithms of their gains."""
    cluster, software = cluster_content(CLUSTER), software_content(SOFTWARE)
    for constant in CONSTANTS:
        if constant.name in gains:
            if constant.home == "cluster":
                cluster = moved(cluster, constant, gains[constant.name])
            else:
                software = moved(software, constant, gains[constant.name])
    files = folder / "true-cluster.yaml", folder / "true-software.yaml"
    for file, content in zip(files, (cluster, software), strict=True):
        file.write_text(yaml_text(content, "planted"), encoding="utf-8")
    return files


def planted_rows(folder: Path, gains: dict[str, float], groups: tuple[str, ...] = tuple(PLANS)) -> list[dict[str, Any]]:
    """Rows of runs whose times are what the model says under planted constants."""
    cluster, software = planted_files(folder, gains)
    rows = []
    for job in (job for job in JOBS if job["group"] in groups):
        asked = {key: value for key, value in job.items() if key != "group"}
        for number, plan in enumerate(PLANS[job["group"]]):
            priced = estimate(**asked, plan=plan, cluster=cluster, software=software).plans[0]
            rows.append(
                {
                    **job,
                    "id": f"{job['group']}-{number}",
                    "source": "planted",
                    "plan": plan,
                    "cluster": CLUSTER,
                    "measured": {"step_time_s": priced.step_time_s},
                }
            )
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as a file of runs."""
    path.write_text(json.dumps({"runs": rows}), encoding="utf-8")
    return path


def scaled(row: dict[str, Any], factor: float) -> dict[str, Any]:
    """A row that took so many times as long."""
    return row | {"measured": {"step_time_s": row["measured"]["step_time_s"] * factor}}
