"""What Python adds to a call: all_reduce of f32 by Rust, from numpy, from torch, through torch.distributed, in the same processes;
and torch's own part of that: the same function over a group that does nothing.

    python latency.py [--ranks 2] [--device cuda] [--rounds 31]

Needs the extension built with its feature "bench". Each rank keeps to a core of its own. In each round all contestants have a
turn, in an order that rotates. Markdown on rank 0's output: the median of the Rust call in microseconds, then for each contestant the
median over rounds of what it takes above the Rust call of the same round ("torch alone" makes none: all that it takes).
"""

import argparse
import os
import warnings

import numpy
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import job
import tinynccl.torch  # noqa: F401
from tinynccl import _core

SIZES = [8, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20]


class Done(c10d.Work):
    def wait(self, timeout=None):
        return True


class Nothing(c10d.ProcessGroup):
    """Torch's own part of a call, for any group that is made in Python."""

    def getBackendName(self):
        return "nothing"

    def allreduce(self, tensors, opts=None):
        return Done() if getattr(opts, "asyncOp", True) else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    args = parser.parse_args()
    job.start_ranks(args.ranks)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    device, other = job.place(args.device)
    rank = job.join("tinynccl")
    cores = sorted(os.sched_getaffinity(0))
    if device.type == "cpu" and len(cores) >= args.ranks:
        os.sched_setaffinity(0, {cores[rank]})
    comm = dist.group.WORLD.comm
    theirs = dist.new_group(backend=other)
    idle = Nothing(rank, args.ranks)
    names = ["Comm, numpy", "Comm, torch", "torch.distributed", "torch alone", f"torch.distributed, {other}"]
    if device.type != "cpu":
        names.remove("Comm, numpy")
    if rank == 0:
        print(f"torch {torch.__version__}, numpy {numpy.__version__}, {args.ranks} ranks, {device.type}, {args.rounds} rounds; "
              f"µs per call{', and above the Rust call' if device.type == 'cpu' else ''}\n")
        first = ["Bytes", "Rust"] if device.type == "cpu" else ["Bytes"]
        print("| " + " | ".join(first + names) + " |\n|" + "---|" * (len(first) + len(names)), flush=True)
    for size in args.sizes:
        tensor, array = torch.zeros(size // 4, device=device), numpy.zeros(size // 4, numpy.float32)
        calls = max(10, min(500, (16 << 20) // size))
        contestants = {
            "Comm, numpy": lambda: job.seconds(lambda: comm.all_reduce(array), calls, device),
            "Comm, torch": lambda: job.seconds(lambda: comm.all_reduce(tensor), calls, device),
            "torch.distributed": lambda: job.seconds(lambda: dist.all_reduce(tensor), calls, device),
            "torch alone": lambda: job.seconds(lambda: dist.all_reduce(tensor, group=idle), calls, device),
            # Slow where each rank has one core: its threads share it.
            f"torch.distributed, {other}": lambda: job.seconds(lambda: dist.all_reduce(tensor, group=theirs), max(5, calls // 50), device),
        }
        turns = {name: contestants[name] for name in names}
        if device.type == "cpu":
            turns["Rust"] = lambda: _core._seconds_of_all_reduce(comm, size // 4, calls)
        order = list(turns)
        rounds = []
        for round in range(args.rounds + 2):
            turn = round % len(order)
            times = {name: turns[name]() * 1e6 for name in order[turn:] + order[:turn]}
            if round >= 2:
                rounds.append(times)
        if rank == 0:
            base = (lambda times: times["Rust"]) if device.type == "cpu" else (lambda times: 0.0)
            cells = [job.median([times["Rust"] for times in rounds], 2)] if device.type == "cpu" else []
            cells += [
                job.median([times[name] - (0.0 if name == "torch alone" else base(times)) for times in rounds], 2) for name in names
            ]
            print(f"| {size} | " + " | ".join(cells) + " |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
