"""Process groups and device meshes of a plan, from the same rank groups that price it."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ap_search.plan.mesh import Group, rank_groups
from ap_search.plan.plan import Plan

KINDS: tuple[Group, ...] = ("tp", "dp-cp", "pp", "ep", "etp", "edp", "tp-ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """A rank's group of each kind, with the members in the group's own order."""

    rank: int
    device_type: str
    members: dict[Group, tuple[int, ...]]
    groups: dict[Group, ProcessGroup]
    subgroups: dict[tuple[Group, int], tuple[ProcessGroup, ProcessGroup]]

    @classmethod
    def of(cls, plan: Plan, *, device_type: str, hsdp_replicas: int = 1) -> "Meshes":
        """Make this rank's groups; every rank of the job calls it, since members make a group together.

        Parameters
        ----------
        plan : Plan
            Its degrees decide the groups.
        device_type : str
            `cpu` or `cuda`.
        hsdp_replicas : int
            Replicas that the data-parallel groups are cut into, 1: none.

        Returns
        -------
        Meshes
        """
        rank = dist.get_rank()
        found = {kind: rank_groups(plan, group=kind) for kind in KINDS}
        members = {kind: next(group for group in groups if rank in group) for kind, groups in found.items()}
        made = {kind: _new_group(ranks, kind) for kind, ranks in members.items()}
        subgroups: dict[tuple[Group, int], tuple[ProcessGroup, ProcessGroup]] = {}
        if hsdp_replicas > 1:
            data: tuple[Group, ...] = ("dp-cp", "edp")
            for kind in data:
                table = torch.tensor(members[kind]).reshape(hsdp_replicas, -1)
                column, row = ((table == rank).nonzero()[0, i].item() for i in (1, 0))
                outer, inner = table[:, int(column)].tolist(), table[int(row)].tolist()
                subgroups[kind, hsdp_replicas] = (
                    _new_group(tuple(outer), f"{kind}-replicas"),
                    _new_group(tuple(inner), kind),
                )
        return cls(rank=rank, device_type=device_type, members=members, groups=made, subgroups=subgroups)

    def size(self, kind: Group) -> int:
        """Count the ranks of this rank's group."""
        return len(self.members[kind])

    def index(self, kind: Group) -> int:
        """Give this rank's place in its group."""
        return self.members[kind].index(self.rank)

    def process(self, kind: Group) -> ProcessGroup | None:
        """Give the process group, None where it is this rank alone."""
        return self.groups[kind] if self.size(kind) > 1 else None

    def mesh(self, kind: Group) -> DeviceMesh:
        """Give a one-dim mesh of this rank's group."""
        return DeviceMesh.from_group(self.groups[kind], self.device_type, mesh_dim_names=(kind.replace("-", "_"),))

    def expert_mesh(self) -> DeviceMesh:
        """Give the mesh (ep, etp) of this rank's dispatch group."""
        table = torch.tensor(self.members["tp-ep"]).reshape(self.size("ep"), self.size("etp"))
        pair = [self.groups["ep"], self.groups["etp"]]
        return DeviceMesh.from_group(pair, self.device_type, mesh=table, mesh_dim_names=("ep", "etp"))

    def hybrid_mesh(self, kind: Group, replicas: int) -> DeviceMesh:
        """Give the mesh (replicas, shards) of this rank's data-parallel group."""
        table = torch.tensor(self.members[kind]).reshape(replicas, -1)
        pair = list(self.subgroups[kind, replicas])
        names = (f"{kind}_replicas".replace("-", "_"), f"{kind}_shards".replace("-", "_"))
        return DeviceMesh.from_group(pair, self.device_type, mesh=table, mesh_dim_names=names)


def _new_group(ranks: tuple[int, ...], name: str) -> ProcessGroup:
    """Make a group of which this rank is a member; only members take part."""
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)
    assert isinstance(group, ProcessGroup)
    return group
