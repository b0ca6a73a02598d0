"""What ranks do in the tests of the launcher: functions of a module, since they are pickled."""

import os
import signal
import time

import torch
import torch.distributed as dist

from ap_search.runtime.launch import Place

LAST_S = 600.0


def adding(place: Place, payload: str) -> str:
    """Add the ranks' numbers up."""
    total = torch.tensor([place.rank])
    dist.all_reduce(total)
    place.report("adding", 0.5)
    return f"{payload} {int(total)} {place.backend} {place.device} {torch.get_num_threads()}"


def raising(place: Place, payload: str) -> str:
    """Raise on the last rank, while the others wait for it."""
    if place.rank == place.world_size - 1:
        raise ValueError(f"no {payload} here")
    dist.barrier()
    return ""


def killed(place: Place, payload: str) -> str:
    """Die on the last rank without a word."""
    if place.rank == place.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return ""


def waiting(place: Place, payload: str) -> str:
    """Wait for ever on one rank; each rank writes its process number to the folder that is given."""
    with open(os.path.join(payload, str(os.getpid())), "w", encoding="utf-8"):
        place.report("waiting for ever", 0.5)
    if place.rank == 0:
        time.sleep(LAST_S)
    dist.barrier()
    return ""
