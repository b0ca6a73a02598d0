"""The presets as rows of a list: models, clusters, software profiles."""

from ap_search.result import ClusterRow, ModelSummary, SoftwareRow
from ap_search.setting import model_summary
from ap_search.spec.cluster import load_cluster
from ap_search.spec.model import load_model
from ap_search.spec.presets import preset_names
from ap_search.spec.profiles import load_software


def list_models() -> tuple[ModelSummary, ...]:
    """Read the model presets: sizes and layers, in order of name."""
    return tuple(model_summary(load_model(name)) for name in preset_names("models"))


def list_clusters() -> tuple[ClusterRow, ...]:
    """Read the cluster presets: device, memory, peaks and links, in order of name."""
    rows = []
    for name in preset_names("clusters"):
        machine = load_cluster(name)
        rows.append(
            ClusterRow(
                name=name,
                device=machine.device,
                memory_bytes=machine.device_memory_bytes,
                peak_bf16_flops_per_s=machine.peak_bf16_flops_per_s,
                devices_per_domain=machine.devices_per_domain,
                scale_up_bytes_per_s=machine.scale_up.bytes_per_s,
                network_bytes_per_s=machine.network.bytes_per_s,
                sources=len(machine.sources),
            )
        )
    return tuple(rows)


def list_software() -> tuple[SoftwareRow, ...]:
    """Read the software profiles: name and description, in order of name."""
    profiles = (load_software(name) for name in preset_names("software"))
    return tuple(SoftwareRow(name=profile.name, description=profile.description) for profile in profiles)
