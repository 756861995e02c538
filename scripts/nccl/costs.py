"""What a communicator and its calls cost the host, and what DDP's steps take, over several libraries in turn, on two GPUs:

    python3 scripts/nccl/costs.py [--rounds 5] [--what host,ddp] NAME=LIBRARY...

Medians over the rounds, and the median of the rounds' ratios of the last NAME to the first. Each round starts two
processes per library, the libraries in the other order each time. `host`: the libraries' functions by ctypes, whose own cost
is in every figure and shown. `ddp`: DistributedDataParallel over PyTorch's backend nccl, the library preloaded.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from ctypes import byref, c_int, c_ulonglong, c_void_p

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import client
from vllm_like import FLOAT, SUM, Cuda, Nccl, UniqueId

# Fewer than the launches that a stream queues before it makes the caller wait.
CALLS, BATCHES = 100, 30
HOST = {
    "start": "start of the first communicator of two, ms",
    "again": "start of a further one, ms",
    "first": "its first all_reduce and its end, ms",
    "ctypes": "a call through ctypes that does nothing, us",
    "all_reduce": "a call of all_reduce, 8 B, us",
    "broadcast": "a call of broadcast, 8 B, us",
    "exchange": "a group of a send and a receive, 8 B, us",
    "bucket": "a group of four all_reduces, 1 KiB, us",
    "replayed": "the same in a CUDA graph of 20, us",
    "mixed": "a group of all_reduce, all_gather, reduce_scatter and broadcast, 1 KiB, us",
    "large": "a group of four all_reduces, 128 KiB, us",
}
DDP = {
    "step32": "a step of 10.5 M parameters, batch 32, ms",
    "step1024": "a step of 10.5 M parameters, batch 1024, ms",
    "alone32": "the same at batch 32 without communication, ms",
}


def host_rank(checks):
    nccl, cuda, comm = Nccl(checks.options.library), Cuda(checks.rank), c_void_p()
    figures = {}

    def timed(name, function):
        begin = time.perf_counter()
        function()
        figures[name] = 1e3 * (time.perf_counter() - begin)

    def id(name):
        def make():
            made = UniqueId()
            nccl.GetUniqueId(byref(made))
            return bytes(made)

        made = UniqueId.from_buffer_copy(client.share(checks, name, make))
        # Both are here before either is timed.
        for rank in range(checks.size):
            client.share_of(checks, f"{name}.here", rank)
        return made

    def start():
        one = id("one")
        timed("start", lambda: nccl.CommInitRank(byref(comm), checks.size, one, checks.rank))
        two = id("two")
        further = c_void_p()
        timed("again", lambda: nccl.CommInitRank(byref(further), checks.size, two, checks.rank))
        nccl.CommDestroy(further)

    def calls():
        stream, memory = cuda.stream(), cuda.memory(4 << 20)
        peer, version = 1 - checks.rank, c_int()

        def all_reduce(count=2):
            nccl.AllReduce(memory, memory, count, FLOAT, SUM, comm, stream)

        def exchange():
            nccl.GroupStart()
            nccl.Send(memory, 2, FLOAT, peer, comm, stream)
            nccl.Recv(memory + 4096, 2, FLOAT, peer, comm, stream)
            nccl.GroupEnd()

        def bucket(count=256):
            nccl.GroupStart()
            for at in range(memory, memory + (4 << 20), 1 << 20):
                nccl.AllReduce(at, at, count, FLOAT, SUM, comm, stream)
            nccl.GroupEnd()

        def mixed():
            nccl.GroupStart()
            all_reduce(256)
            nccl.AllGather(memory + (1 << 20), memory + (2 << 20), 256, FLOAT, comm, stream)
            nccl.ReduceScatter(memory + (1 << 20), memory + (3 << 20), 256, FLOAT, SUM, comm, stream)
            nccl.Broadcast(memory + (7 << 19), memory + (7 << 19), 256, FLOAT, 0, comm, stream)
            nccl.GroupEnd()

        timed("first", lambda: (all_reduce(), cuda("cuStreamSynchronize", stream)))
        subjects = {
            "ctypes": lambda: nccl.GetVersion(byref(version)),
            "all_reduce": all_reduce,
            "broadcast": lambda: nccl.Broadcast(memory, memory, 2, FLOAT, 0, comm, stream),
            "exchange": exchange,
            "bucket": bucket,
            "mixed": mixed,
            "large": lambda: bucket(32 << 10),
        }
        # Kernels are loaded before they are timed, and before a capture.
        for subject in subjects.values():
            subject()
        cuda("cuStreamSynchronize", stream)
        for name, subject in subjects.items():
            batches = []
            for _ in range(BATCHES):
                begin = time.perf_counter()
                for _ in range(CALLS):
                    subject()
                batches.append(1e6 * (time.perf_counter() - begin) / CALLS)
                cuda("cuStreamSynchronize", stream)
            figures[name] = statistics.median(batches)
        graph, replay = c_void_p(), c_void_p()
        cuda("cuStreamBeginCapture_v2", stream, 1)
        for _ in range(20):
            bucket()
        cuda("cuStreamEndCapture", stream, byref(graph))
        cuda("cuGraphInstantiateWithFlags", byref(replay), graph, c_ulonglong(0))
        times = []
        for _ in range(BATCHES):
            begin = time.perf_counter()
            for _ in range(10):
                cuda("cuGraphLaunch", replay, stream)
            cuda("cuStreamSynchronize", stream)
            times.append(1e6 * (time.perf_counter() - begin) / 200)
        figures["replayed"] = statistics.median(times)
        cuda("cuGraphExecDestroy", replay)
        cuda("cuGraphDestroy", graph)
        cuda("cuMemFree_v2", c_ulonglong(memory))
        nccl.CommDestroy(comm)

    checks.run("start", start)
    checks.run("calls", calls)
    if checks.rank == 0:
        for name, value in figures.items():
            print(f"value {name} {value}", flush=True)


def ddp_rank():
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    client.say_which(f"rank {rank}", linked=True)
    width = 1024

    def steps(batch, replicate):
        torch.manual_seed(1)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(10)]).cuda()
        replica = DistributedDataParallel(net, device_ids=[rank]) if replicate else net
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        inputs = torch.randn(batch, width, device="cuda")

        def some(count):
            for _ in range(count):
                optimizer.zero_grad()
                replica(inputs).square().mean().backward()
                optimizer.step()
            torch.cuda.synchronize()

        some(20)
        times = []
        for _ in range(20):
            dist.barrier()
            begin = time.perf_counter()
            some(20)
            times.append(1e3 * (time.perf_counter() - begin) / 20)
        return statistics.median(times)

    figures = {"step32": steps(32, True), "step1024": steps(1024, True), "alone32": steps(32, False)}
    if rank == 0:
        for name, value in figures.items():
            print(f"value {name} {value}", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--what", default="host,ddp")
    parser.add_argument("libraries", nargs="+", metavar="NAME=LIBRARY")
    options = parser.parse_args()
    libraries = dict(pair.split("=", 1) for pair in options.libraries)
    failed = 0
    print("| | " + " | ".join(libraries) + " | ratio |")
    print("|---|" + "---|" * (len(libraries) + 1), flush=True)
    for what in options.what.split(","):
        subjects = {"host": HOST, "ddp": DDP}[what]
        values = {name: {subject: [] for subject in subjects} for name in libraries}
        for turn in range(options.rounds):
            for name in list(libraries)[:: 1 if turn % 2 == 0 else -1]:
                environment, library = dict(os.environ), os.path.abspath(libraries[name])
                if what == "host":
                    command = [sys.executable, __file__, "--rank-of", what, "--library", library]
                else:
                    environment["LD_PRELOAD"] = library
                    command = ["torchrun", "--nproc-per-node", "2", "--master-port", "29641", __file__, "--rank-of", what]
                end = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
                lines = [line.split() for line in end.stdout.splitlines() if line.startswith("value ")]
                if end.returncode or len(lines) != len(subjects):
                    failed += 1
                    print(f"FAILED {name}, {what}, round {turn}:\n{end.stdout[-1000:]}\n{end.stderr[-2000:]}", flush=True)
                for _, subject, value in lines:
                    values[name][subject].append(float(value))
        for subject, title in subjects.items():
            rows = [values[name][subject] for name in libraries]
            if all(rows):
                ratio = statistics.median(b / a for a, b in zip(rows[0], rows[-1]))
                print(f"| {title} | " + " | ".join(f"{statistics.median(row):.2f}" for row in rows) + f" | {ratio:.2f} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    if "--rank-of" in sys.argv:
        if sys.argv[sys.argv.index("--rank-of") + 1] == "ddp":
            ddp_rank()
        else:
            sys.exit(client.ranks(host_rank, client.arguments(__doc__, rank_of={}, library={})))
    else:
        sys.exit(main())
