"""What ranks do in the tests of the launcher: functions of a module, since they are pickled."""

import os
import signal
import time

import torch
import torch.distributed as dist

from ap_search.plan.text import plan_name
from ap_search.result.verification import read_verification
from ap_search.runtime import prediction
from ap_search.runtime.collectives import all_to_all, labelled
from ap_search.runtime.counters import TrafficCounter
from ap_search.runtime.execute import Execution
from ap_search.runtime.launch import Place
from ap_search.runtime.verify import VerifyJob, verify_rank

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


def scattering(place: Place, payload: str) -> str:
    """Send in a way that no check knows, and say what was counted."""
    with TrafficCounter() as traffic:
        dist.scatter(torch.zeros(3), [torch.zeros(3), torch.zeros(3)] if place.rank == 0 else None)
        dist.barrier()
    return str(dict(traffic.sent_bytes))


def counting(place: Place, payload: str) -> str:
    """Send known amounts in every way, forward and backward, and say what was counted."""
    group, ranks = dist.group.WORLD, place.world_size
    values = torch.zeros(12 * ranks)
    with TrafficCounter() as traffic:
        dist.all_reduce(values)
        dist.all_gather_into_tensor(torch.zeros(12 * ranks), values[:12])
        dist.reduce_scatter_tensor(torch.zeros(12), values)
        with labelled("tp"):
            dist.all_gather([torch.zeros(12) for _ in range(ranks)], values[:12])
        if place.rank == 0:
            dist.send(values[:5], 1)
        if place.rank == 1:
            dist.recv(values[:5], 0)
        rows = torch.zeros(6, 2, requires_grad=True)
        send = [4, 2] if place.rank == 0 else [1, 5]
        receive = [4, 1] if place.rank == 0 else [2, 5]
        all_to_all(rows, send=send, receive=receive, group=group, label="dispatch").sum().backward()
        dist.barrier()
    return repr(dict(traffic.sent_bytes))


def verifying(place: Place, jobs: list[VerifyJob]) -> str:
    """Verify several plans one after the other, and name for each the checks that fail."""
    found = []
    for job in jobs:
        place.report(plan_name(job.plan), 0.5)
        text = verify_rank(place, job)
        if place.rank == 0:
            result = read_verification(text)
            found += [
                f"{result.model} {result.plan} {result.dtype}: {check}" for check in result.checks if not check.ok
            ]
    return "\n".join(found)


def halving_gradients(place: Place, job: VerifyJob) -> str:
    """Verify with experts' gradients divided once too often, as by a group of the wrong size."""
    honest = Execution.gradients

    def halved(execution: Execution) -> dict[str, torch.Tensor]:
        wrong = 1 if execution.meshes is None else 2  # The single process stays right.
        return {name: grad / wrong if ".experts." in name else grad for name, grad in honest(execution).items()}

    Execution.gradients = halved
    return verify_rank(place, job)


def overpricing_combine(place: Place, job: VerifyJob) -> str:
    """Verify against a prediction that has one byte too many in each combine."""
    honest = prediction.combine_sent_bytes
    prediction.combine_sent_bytes = lambda *given, **named: honest(*given, **named) + 1
    return verify_rank(place, job)
