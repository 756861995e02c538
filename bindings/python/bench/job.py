"""Ranks of a benchmark, and medians: a benchmark started by hand starts itself once per rank (as torchrun would)."""

import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch


def start_ranks(count):
    """Runs this program as ``count`` ranks, unless it is one already; does not return then."""
    if "RANK" in os.environ:
        return
    with tempfile.TemporaryDirectory() as folder:
        shared = {"WORLD_SIZE": str(count), "INIT_METHOD": f"file://{folder}/store", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(count)
        ]
        codes = [rank.wait() for rank in ranks]
    raise SystemExit(next((code for code in codes if code), 0))


def join(backend):
    """Rank, and the arguments' device, once the process group is there."""
    import torch.distributed as dist

    where = {"init_method": os.environ["INIT_METHOD"]} if "INIT_METHOD" in os.environ else {}
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), **where)
    return rank


def place(device):
    """The device of this rank, and the name of torch's own backend for it."""
    if device == "cpu":
        return torch.device("cpu"), "gloo"
    local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(local)
    return local, "nccl"


def seconds(function, calls, device):
    """Per call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def median(values, digits):
    return f"{statistics.median(values):.{digits}f}"
