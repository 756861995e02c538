"""Speed from Python, 2 ranks: DDP steps over tinynccl and over gloo (or nccl) in turn, and all_reduce by size.

    torchrun --nproc-per-node 2 bench/ddp.py [--device cuda] [--steps 20] [--rounds 5]

Medians over rounds; backends take turns within each round, in the same processes. Markdown on rank 0's output.
"""

import argparse
import os
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tinynccl
import tinynccl.torch  # noqa: F401


def model(width):
    """10.5 million parameters at width 1024: ten layers."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(10)])


def microseconds(function, calls, device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6


def main():
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32, help="per rank")
    parser.add_argument("--only", choices=["ddp", "calls"])
    args = parser.parse_args()
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    other = "nccl" if device.type == "cuda" else "gloo"
    where = {"init_method": os.environ["INIT_METHOD"]} if "INIT_METHOD" in os.environ else {}
    dist.init_process_group("tinynccl", rank=rank, world_size=int(os.environ["WORLD_SIZE"]), **where)
    groups = {"tinynccl": dist.group.WORLD, other: dist.new_group(backend=other)}

    def say(line):
        if rank == 0:
            print(line, flush=True)

    say(f"torch {torch.__version__}, {dist.get_world_size()} ranks, {device.type}\n")
    if args.only != "calls":
        steps = {}
        for name, group in groups.items():
            torch.manual_seed(1)
            net = model(args.width).to(device)
            ids = [local] if device.type == "cuda" else None
            replica = DistributedDataParallel(net, device_ids=ids, process_group=group)
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
            inputs = torch.randn(args.batch, args.width, device=device)

            def step(replica=replica, optimizer=optimizer, inputs=inputs):
                optimizer.zero_grad()
                replica(inputs).square().mean().backward()
                optimizer.step()

            steps[name] = step
            for _ in range(3):
                step()

        # Without communication, for the price of the rest.
        lone = model(args.width).to(device)
        lone_optimizer = torch.optim.SGD(lone.parameters(), lr=1e-3)
        lone_inputs = torch.randn(args.batch, args.width, device=device)

        def alone():
            lone_optimizer.zero_grad()
            lone(lone_inputs).square().mean().backward()
            lone_optimizer.step()

        steps["no communication"] = alone
        alone()
        times = {name: [] for name in steps}
        for _ in range(args.rounds):
            for name, step in steps.items():
                dist.barrier()
                times[name].append(microseconds(step, args.steps, device) / 1000)
        parameters = sum(p.numel() for p in lone.parameters())
        say(f"DDP of {parameters / 1e6:.1f} M parameters, batch {args.batch} per rank, {args.rounds} rounds of {args.steps} steps\n")
        say("| Backend | ms per step, median | each round |\n|---|---|---|")
        for name, values in times.items():
            say(f"| {name} | {statistics.median(values):.2f} | {' '.join(f'{v:.1f}' for v in values)} |")
        ratios = [a / b for a, b in zip(times["tinynccl"], times[other])]
        say(f"\ntinynccl / {other}, median of rounds: {statistics.median(ratios):.3f}\n")

    if args.only != "ddp":
        comm = dist.group.WORLD.comm
        say(f"all_reduce of f32, microseconds per call, median of {args.rounds} rounds\n")
        say(f"| Bytes | Comm.all_reduce | torch.distributed, tinynccl | torch.distributed, {other} |\n|---|---|---|---|")
        for size in (8, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20):
            tensor = torch.zeros(size // 4, device=device)
            calls = max(10, min(1000, (8 << 20) // size * 4))
            functions = [
                lambda: comm.all_reduce(tensor),
                lambda: dist.all_reduce(tensor, group=groups["tinynccl"]),
                lambda: dist.all_reduce(tensor, group=groups[other]),
            ]
            cells = []
            for function in functions:
                for _ in range(10):
                    function()
            rounds = [[microseconds(function, calls, device) for function in functions] for _ in range(args.rounds)]
            cells = [f"{statistics.median(column):.1f}" for column in zip(*rounds)]
            say(f"| {size} | " + " | ".join(cells) + " |")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert tinynccl.__version__
    main()
