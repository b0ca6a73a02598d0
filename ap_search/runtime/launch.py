"""Start the ranks of a run: local processes, or those that torchrun started; a rank that dies ends them all."""

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from ap_search.errors import RunFailed, SpecError

GIB = 2**30
PROCESSES_PER_CORE = 16
BYTES_PER_PROCESS = GIB // 2
# Peers of a dead rank see its sockets close and end by themselves; what has not by then is killed.
GRACE_S = 2.0
POLL_S = 0.2
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

Progress = Callable[[str, float], None]
RankMain = Callable[["Place", Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank runs: its number, how many there are, what carries messages, and where tensors live.

    `store` is shared by all ranks, and locally by the process that started them.
    """

    rank: int
    world_size: int
    backend: str
    device: str
    store: dist.Store

    def report(self, what: str, share: float) -> None:
        """Tell the process that shows progress what is being done, and which share of the run is done (rank 0 only)."""
        if self.rank == 0:
            self.store.set("progress", f"{share} {what}")


def under_torchrun() -> bool:
    """Tell whether torchrun (or another elastic launcher) started this process as one rank."""
    return all(name in os.environ for name in TORCHRUN_VARIABLES)


def memory_bytes() -> int:
    """Measure the memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def local_ranks(devices: int) -> int:
    """Count the ranks of this machine: all of them, or those that torchrun started here."""
    return _variable("LOCAL_WORLD_SIZE", devices) if under_torchrun() else devices


def _variable(name: str, default: int) -> int:
    """Read a number that torchrun sets."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise SpecError(name, f"is {text!r}, as the launcher set it", "an integer, as torchrun sets it")
    return int(text)


def process_limit() -> int:
    """Count the processes that this machine may run: 16 per core, half a GiB of memory each.

    Returns
    -------
    int
        At least 1; no less than the number of GPUs.

    Notes
    -----
    A1. A process holds some 0.3 GiB with PyTorch loaded and a toy model; ranks mostly wait for one another.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, torch.cuda.device_count(), min(PROCESSES_PER_CORE * cores, memory_bytes() // BYTES_PER_PROCESS))


def launch(main: RankMain, payload: Any, *, devices: int, timeout_s: float, progress: Progress) -> str:
    """Run `main` on every rank of a process group, and return what rank 0 returned.

    Parameters
    ----------
    main : callable
        Called with the rank's place and `payload` after `init_process_group`; a function of a module (it is pickled).
    payload : object
        The same for all ranks; it is pickled.
    devices : int
        Ranks.
    timeout_s : float
        Seconds that the run may take.
    progress : callable
        Called with what rank 0 reports and the share that is done, 0..1.

    Returns
    -------
    str
        Under torchrun the same on every rank.

    Raises
    ------
    SpecError
        More processes than the machine may run; under torchrun, another number of ranks than `devices`.
    RunFailed
        A rank raised, died or the time is over: with the traceback of the rank that failed first. All are gone then.

    Notes
    -----
    A1. NCCL where each local rank has a GPU of its own, gloo on CPUs otherwise.
    A2. Local ranks meet at a store of this process, on a port that the system chose and that is held from then on: no
        two runs can clash.

    Source: docs/guides/verify.md.
    """
    if under_torchrun():
        return _join_torchrun(main, payload, devices=devices, timeout_s=timeout_s)
    limit = process_limit()
    if devices > limit:
        raise SpecError("--devices", f"{devices} processes are too many for this machine", _limit_text(limit))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    # The server of the fork server imports torch once; ranks are forked off it, and none inherits this process's state.
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, main.__module__])
    with _terminable():
        context = start_processes(
            _local_rank,
            args=(main, payload, devices, store.port, timeout_s),
            nprocs=devices,
            join=False,
            daemon=True,
            start_method="forkserver",
        )
        try:
            _watch(context, store, timeout_s=timeout_s, progress=progress)
        finally:
            _end(context)
    return store.get("result").decode()


def _limit_text(limit: int) -> str:
    """Say how many processes are allowed and why."""
    per = f"{PROCESSES_PER_CORE} per core, {BYTES_PER_PROCESS / GIB:g} GiB of memory each"
    return f"1 to {limit} on this machine ({per}); more under torchrun on several machines"


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does, so that its ranks are ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(context: ProcessContext, store: dist.TCPStore, *, timeout_s: float, progress: Progress) -> None:
    """Wait until every rank has ended; raise with the first rank's traceback when one fails."""
    deadline = time.monotonic() + timeout_s
    said, doing = "", "starting the processes"
    try:
        while not context.join(timeout=POLL_S, grace_period=GRACE_S):
            if store.check(["progress"]) and (now := store.get("progress").decode()) != said:
                said, (share, doing) = now, now.split(" ", 1)
                progress(doing, float(share))
            if time.monotonic() > deadline:
                _dump_stacks(context)
                raise RunFailed(f"no end after {timeout_s:g} s (--timeout-s), while {doing}")
    except ProcessRaisedException as error:
        rank, trace = _first_failure(store) or (error.error_index, error.msg)
        raise RunFailed(f"rank {rank} of {len(context.processes)} failed while {doing}", trace) from None
    except ProcessExitedException as error:
        raise RunFailed(f"rank {error.error_index} of {len(context.processes)} died: {error.msg}") from None


def _first_failure(store: dist.TCPStore) -> tuple[int, str] | None:
    """Read which rank failed first, and its traceback: its peers then fail for want of it."""
    if not store.check(["failed"]):
        return None
    rank, trace = store.get("failed").decode().split(" ", 1)
    return int(rank), trace


def _dump_stacks(context: ProcessContext) -> None:
    """Have every rank write where it stands to stderr."""
    for pid in context.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(POLL_S)


def _end(context: ProcessContext) -> None:
    """Kill the ranks that are still there."""
    for process in context.processes:
        if process.is_alive():
            process.kill()
        process.join()
    for path in context.error_files:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _local_rank(rank: int, main: RankMain, payload: Any, world_size: int, port: int, timeout_s: float) -> None:
    """Be one local rank: join the group, run, leave what rank 0 returns in the store."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Dead at once on Ctrl-C: Python's own handler would wait for the collective to return.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timeout)
    try:
        device = _device(rank, world_size)
        dist.init_process_group(_BACKENDS[device[:4]], store=store, rank=rank, world_size=world_size, timeout=timeout)
        place = _place(rank, world_size, device, store)
        answer = main(place, payload)
        dist.barrier()
    except Exception:
        store.compare_set("failed", "", f"{rank} {traceback.format_exc()}")
        raise
    if rank == 0:
        store.set("result", answer)
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this rank when the process that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _join_torchrun(main: RankMain, payload: Any, *, devices: int, timeout_s: float) -> str:
    """Be the rank that torchrun made this process; torchrun ends the others where one fails."""
    rank, world_size = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    if devices != world_size:
        raise SpecError("--devices", f"is {devices}, but torchrun started {world_size} processes", str(world_size))
    local_rank, local_world = _variable("LOCAL_RANK", rank), local_ranks(world_size)
    try:
        device = _device(local_rank, local_world)
        dist.init_process_group(_BACKENDS[device[:4]], timeout=timedelta(seconds=timeout_s))
        store = dist.distributed_c10d._get_default_store()
        answer = main(_place(rank, world_size, device, store), payload)
        if rank == 0:
            store.set("result", answer)
        dist.barrier()
        answer = store.get("result").decode()
        dist.barrier()  # The store lives with rank 0: nobody leaves before all have read.
        dist.destroy_process_group()
    except Exception:
        raise RunFailed(f"rank {rank} of {world_size} failed", traceback.format_exc()) from None
    return answer


def _device(local_rank: int, local_world: int) -> str:
    """Choose where tensors of this rank live, and keep torch to one thread: ranks share the cores."""
    torch.set_num_threads(1)
    if torch.cuda.device_count() < local_world:
        return "cpu"
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"


def _place(rank: int, world_size: int, device: str, store: dist.Store) -> Place:
    """Describe this rank."""
    backend = dist.get_backend() if device == "cpu" else "nccl"
    return Place(rank=rank, world_size=world_size, backend=backend, device=device, store=store)
