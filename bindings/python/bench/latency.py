"""The time that Python adds to a call: all_reduce of f32 by Rust, from numpy, from torch, and through torch.distributed, in
the same processes; and torch's own part of that, by the same function over a group that does nothing.

    python latency.py [--ranks 2] [--device cuda] [--rounds 31]

Needs the extension built with its feature "bench". Each rank is pinned to a core of its own. In each round every contestant
has a turn, in an order that rotates. torch's own backend comes after all others, because its threads share the ranks' cores.
Rank 0 prints Markdown: the median of the Rust call in microseconds, then for each contestant the median over rounds of its
time minus that of the Rust call of the same round ("torch alone" makes no call, so its whole time counts).

Start it several times. The interpreter's addresses in memory can slow a whole run by a factor of 1.6: "torch alone" then
takes 2 us and not 1.2.
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
    on_cpu = device.type == "cpu"

    def measure(size, contestants):
        """Median of the Rust call, and of what each contestant takes above it."""
        calls = max(10, min(500, (16 << 20) // size))
        tensor, array = torch.zeros(size // 4, device=device), numpy.zeros(size // 4, numpy.float32)
        turns = {name: lambda make=make: make(tensor, array, calls) for name, make in contestants.items()}
        if on_cpu:
            turns["Rust"] = lambda: _core._seconds_of_all_reduce(comm, size // 4, calls)
        order, rounds = list(turns), []
        for round in range(args.rounds + 2):
            turn = round % len(order)
            times = {}
            for name in order[turn:] + order[:turn]:
                # The barrier keeps a rank that is late from the last contestant out of this measurement.
                comm.barrier()
                times[name] = turns[name]() * 1e6
            if round >= 2:
                rounds.append(times)
        above = {name: [times[name] - (times["Rust"] if on_cpu and name != "torch alone" else 0.0) for times in rounds] for name in order}
        if on_cpu:
            above["Rust"] = [times["Rust"] for times in rounds]
        return {name: job.median(values, 2) for name, values in above.items()}

    idle = Nothing(rank, args.ranks)
    contestants = {
        "Comm, numpy": lambda tensor, array, calls: job.seconds(lambda: comm.all_reduce(array), calls, device),
        "Comm, torch": lambda tensor, array, calls: job.seconds(lambda: comm.all_reduce(tensor), calls, device),
        "torch.distributed": lambda tensor, array, calls: job.seconds(lambda: dist.all_reduce(tensor), calls, device),
        "torch alone": lambda tensor, array, calls: job.seconds(lambda: dist.all_reduce(tensor, group=idle), calls, device),
    }
    if not on_cpu:
        del contestants["Comm, numpy"]
    table = {size: measure(size, contestants) for size in args.sizes}
    # Behind all others, which its threads might disturb.
    theirs = dist.new_group(backend=other)
    name = f"torch.distributed, {other}"
    behind = {name: lambda tensor, array, calls: job.seconds(lambda: dist.all_reduce(tensor, group=theirs), max(5, calls // 50), device)}
    for size in args.sizes:
        table[size][name] = measure(size, behind)[name]
    if rank == 0:
        print(f"torch {torch.__version__}, numpy {numpy.__version__}, {args.ranks} ranks, {device.type}, {args.rounds} rounds; "
              f"µs per call{', and above the Rust call' if on_cpu else ''}\n")
        columns = [*(["Rust"] if on_cpu else []), *contestants, name]
        print("| " + " | ".join(["Bytes", *columns]) + " |\n|" + "---|" * (len(columns) + 1))
        for size in args.sizes:
            print(f"| {size} | " + " | ".join(table[size][column] for column in columns) + " |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
