"""One rank of scripts/nccl-net-nodes.sh: PyTorch's collectives of backend nccl with exact results, then times.

    RANK=0 WORLD_SIZE=3 LOCAL_RANK=0 INIT_METHOD=file:///tmp/store nodes.py [--seconds S]

Values are small whole numbers, so that every order of additions gives the same sum. --seconds: 16 MiB are added again and
again for so long, every result compared, and the longest call is printed.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

COUNTS = [1, 1000, 1 << 16, (1 << 20) + 7, 1 << 24, 1 << 26]
# Counts of the timed all_reduces, and how often: 8 B to 256 MiB.
TIMED = [(2, 200), (1 << 8, 200), (1 << 16, 50), (1 << 20, 20), (1 << 24, 5), (1 << 26, 5)]


def values(rank, count, device):
    return (torch.arange(count, device=device) % 97 + 3 * rank).float()


def equal(what, got, expected):
    wrong = int((got != expected).sum())
    if wrong:
        raise SystemExit(f"{what}: {wrong} of {expected.numel()} values are wrong")


def collectives(rank, ranks, count, device):
    """All collectives, and a message from every rank to every other one."""
    mine = values(rank, count, device)
    everyone = [values(r, count, device) for r in range(ranks)]
    total = sum(everyone)

    got = mine.clone()
    dist.all_reduce(got)
    equal(f"all_reduce of {count}", got, total)

    got = torch.zeros(ranks * count, device=device)
    dist.all_gather_into_tensor(got, mine)
    equal(f"all_gather of {count}", got, torch.cat(everyone))

    got = torch.zeros(count, device=device)
    dist.reduce_scatter_tensor(got, torch.cat([mine + part for part in range(ranks)]))
    equal(f"reduce_scatter of {count}", got, total + ranks * rank)

    for root in range(ranks):
        got = mine.clone()
        dist.broadcast(got, root)
        equal(f"broadcast of {count} from {root}", got, everyone[root])

    got = torch.zeros(ranks * count, device=device)
    dist.all_to_all_single(got, torch.cat([mine + part for part in range(ranks)]))
    equal(f"all_to_all of {count}", got, torch.cat(everyone) + rank)


def timed(call, rounds):
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds


def for_seconds(seconds, rank, ranks, device):
    """The longest all_reduce of many. Rank 0 says when it is enough, with the data."""
    mine = values(rank, 1 << 22, device)
    total = sum(values(r, 1 << 22, device) for r in range(ranks))
    start, longest, calls = time.perf_counter(), 0.0, 0
    go_on = True
    while go_on:
        begin = time.perf_counter()
        got = mine.clone()
        dist.all_reduce(got)
        flag = torch.tensor(float(time.perf_counter() - start < seconds), device=device)
        dist.broadcast(flag, 0)
        go_on = bool(flag.item())
        longest, calls = max(longest, time.perf_counter() - begin), calls + 1
        equal(f"all_reduce number {calls}", got, total)
    return f"{calls} calls, the longest {1e3 * longest:.0f} ms, on the average {1e3 * (time.perf_counter() - start) / calls:.1f} ms"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0)
    args = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=os.environ["INIT_METHOD"], rank=rank, world_size=ranks, device_id=device)
    for count in COUNTS:
        collectives(rank, ranks, count, device)
    lines = [f"{ranks} ranks, five collectives of {', '.join(map(str, COUNTS))} floats: every value right"]
    if args.seconds:
        lines.append(f"all_reduce of 16 MiB: {for_seconds(args.seconds, rank, ranks, device)}")
    for count, rounds in TIMED:
        buffer = torch.zeros(count, device=device)
        seconds = timed(lambda: dist.all_reduce(buffer), rounds)
        # As nccl-tests: bytes over time, and the rate that each cable of a ring then has.
        algbw = 4 * count / seconds / 1e9
        busbw = algbw * 2 * (ranks - 1) / ranks
        lines.append(f"all_reduce of {4 * count} bytes: {1e6 * seconds:.1f} us, {algbw:.3f} GB/s, bus {busbw:.3f} GB/s")
    if rank == 0:
        print("\n".join(lines), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
