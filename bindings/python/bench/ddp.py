"""DistributedDataParallel over tinynccl and over torch's own backend: time of a step, in turn, in the same processes.

    python ddp.py [--ranks 2] [--device cuda] [--steps 10] [--rounds 7] [--blocks 128 32]

Medians over rounds; each round starts with the next of the contestants. Markdown on rank 0's output.
"""

import argparse
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import job
import tinynccl.torch  # noqa: F401


def model(width):
    """10.5 million parameters at width 1024: ten layers."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(10)])


def limited(blocks):
    """A group that takes no more of a GPU."""
    before = os.environ.get("TINYNCCL_CUDA_BLOCKS")
    os.environ["TINYNCCL_CUDA_BLOCKS"] = blocks
    try:
        return dist.new_group(backend="tinynccl")
    finally:
        if before is None:
            del os.environ["TINYNCCL_CUDA_BLOCKS"]
        else:
            os.environ["TINYNCCL_CUDA_BLOCKS"] = before


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32, help="per rank")
    parser.add_argument("--blocks", nargs="*", default=[], help="more contestants: tinynccl with so many blocks of a GPU at most")
    parser.add_argument("--only", help="one contestant, for a profile: tinynccl, gloo, nccl")
    args = parser.parse_args()
    job.start_ranks(args.ranks)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    device, other = job.place(args.device)
    rank = job.join("tinynccl")
    groups = {"tinynccl": dist.group.WORLD, other: dist.new_group(backend=other), "no communication": None}
    for blocks in args.blocks:
        groups[f"tinynccl, {blocks} blocks"] = limited(blocks)
    if args.only:
        groups = {args.only: groups[args.only]}

    def say(line):
        if rank == 0:
            print(line, flush=True)

    def stepper(group):
        torch.manual_seed(1)
        net = model(args.width).to(device)
        ids = [device.index] if device.type == "cuda" else None
        replica = DistributedDataParallel(net, device_ids=ids, process_group=group) if group is not None else net
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        inputs = torch.randn(args.batch, args.width, device=device)

        def step():
            optimizer.zero_grad()
            replica(inputs).square().mean().backward()
            optimizer.step()

        return step

    steps = {name: stepper(group) for name, group in groups.items()}
    for step in steps.values():
        for _ in range(3):
            step()
    names = list(steps)
    times = {name: [] for name in names}
    for round in range(args.rounds):
        first = round % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            times[name].append(job.seconds(steps[name], args.steps, device) * 1e3)
    parameters = sum(p.numel() for p in model(args.width).parameters())
    say(f"torch {torch.__version__}, {dist.get_world_size()} ranks, {device.type}: DDP of {parameters / 1e6:.1f} M parameters, "
        f"batch {args.batch} per rank, {args.rounds} rounds of {args.steps} steps\n")
    say("| Backend | ms per step, median | each round |\n|---|---|---|")
    for name, values in times.items():
        say(f"| {name} | {job.median(values, 2)} | {' '.join(f'{v:.1f}' for v in values)} |")
    if not args.only:
        say("")
        for name in names:
            if name.startswith("tinynccl"):
                ratios = [a / b for a, b in zip(times[name], times[other])]
                say(f"{name} / {other}, median of rounds: {job.median(ratios, 3)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
