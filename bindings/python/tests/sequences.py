"""Random sequences of collectives, messages, groups and their ends over the backend "tinynccl", compared with gloo.

    sequences.py [--seconds S] [--seed N] [--size N]

A seed gives one sequence, the same on all ranks. Each rank makes every call over both backends; values must be the same.
"""

import argparse
import random
import sys
import time

import torch
import torch.distributed as dist

from programs import Program, judge, run

CALLS = 25
TYPES = ["float32", "float64", "int32", "int64", "uint8"]


def make(rng, rank, count, dtype, odd):
    """Small whole numbers, whose sums are exact, in memory of any kind."""
    values = [rng.randrange(5) for _ in range(64)]
    tensor = torch.tensor([(values[i % 64] + rank * i) % 4 for i in range(count)]).to(getattr(torch, dtype))
    if odd == "strided":
        return torch.stack([tensor, tensor], 1)[:, 0]
    if odd == "negated" and dtype.startswith("float"):
        return torch._neg_view(-tensor)
    return tensor


def step(rng, rank, size, ours, theirs):
    """One call, over a group of ours and its counterpart. All ranks draw the same numbers."""
    kind = rng.choice(["all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "all_to_all_single", "coalesced",
                       "messages", "async", "any", "barrier"])  # fmt: skip
    count, dtype, root = rng.choice([1, 3, 100, 5000, 40_000]), rng.choice(TYPES), rng.randrange(size)
    odd = rng.choice(["plain", "plain", "strided", "negated"])
    odd = odd if rng.randrange(size) == rank else "plain"
    op = rng.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN])
    state = rng.getstate()
    found = []
    # The judge is given plain memory: it takes no other, or takes it for another.
    for group, how in ((ours, odd), (theirs, "plain")):
        rng.setstate(state)
        one, members = make(rng, rank, count, dtype, how), [group_rank(group, r) for r in range(size)]
        if kind in ("all_reduce", "async"):
            work = dist.all_reduce(one, op, group=group, async_op=kind == "async")
            if kind == "async":
                later = make(rng, rank, 7, dtype, "plain")
                dist.all_reduce(later, group=group)
                work.wait()
                one = torch.cat([one, later])
        elif kind == "broadcast":
            dist.broadcast(one, members[root], group=group)
        elif kind == "reduce":
            dist.reduce(one, members[root], op, group=group)
            one = one if rank == root else one[:0]
        elif kind == "all_gather":
            parts = [torch.zeros_like(one.contiguous()) for _ in range(size)]
            dist.all_gather(parts, one, group=group)
            one = torch.cat(parts)
        elif kind == "gather":
            parts = [torch.zeros(count, dtype=one.dtype) for _ in range(size)] if rank == root else None
            dist.gather(one, parts, members[root], group=group)
            one = torch.cat(parts) if parts else one[:0]
        elif kind == "scatter":
            parts = [one + r for r in range(size)] if rank == root else None
            one = torch.zeros(count, dtype=one.dtype)
            dist.scatter(one, parts, members[root], group=group)
        elif kind == "all_to_all_single":
            one, got = make(rng, rank, count * size, dtype, how), torch.zeros(count * size, dtype=one.dtype)
            lengths = [count] * size if rng.randrange(size) == rank else None
            dist.all_to_all_single(got, one, lengths, lengths, group=group)
            one = got
        elif kind == "coalesced":
            several = [one, make(rng, rank, 3, dtype, how)]
            dist.all_reduce_coalesced(several, op, group=group)
            one = torch.cat(several)
        elif kind == "messages" and size > 1:
            right, left = members[(rank + 1) % size], members[(rank - 1) % size]
            works = [dist.isend(make(rng, rank + tag, count, dtype, how), right, group, tag) for tag in range(3)]
            parts = {tag: torch.zeros(count, dtype=one.dtype) for tag in (2, 0, 1)}
            works += [dist.irecv(part, left, group, tag) for tag, part in parts.items()]
            for work in works:
                work.wait()
            one = torch.cat([parts[tag] for tag in range(3)])
        elif kind == "any" and size > 1:
            if rank == root:
                parts = {}
                for _ in range(size - 1):
                    got = torch.zeros(count, dtype=one.dtype)
                    parts[dist.recv(got, group=group, tag=9)] = got
                one = torch.cat([parts[source] for source in sorted(parts)])
            else:
                dist.send(one, members[root], group=group, tag=9)
            dist.barrier(group)
        else:
            dist.barrier(group)
        found.append(one.contiguous())
    # An operation over a negated tensor leaves its bit, which `equal` reads as torch does.
    assert torch.equal(*found), f"{kind} of {count} {dtype} ({odd}, root {root}): {found[0]} is not {found[1]}"
    return kind


def group_rank(group, rank):
    if hasattr(dist, "get_global_rank"):
        return dist.get_global_rank(group, rank)
    return dist.distributed_c10d._get_global_rank(group, rank)


def sequence(seed, size):
    def run_sequence(job):
        rng, made = random.Random(seed), []
        job.join(seconds=60)
        pairs = [(dist.distributed_c10d._get_default_group(), dist.new_group(backend="gloo"), list(range(size)))]
        for _ in range(CALLS):
            if rng.random() < 0.1:
                members = sorted(rng.sample(range(size), rng.randrange(1, size + 1)))
                pairs.append((dist.new_group(members, backend="tinynccl"), dist.new_group(members, backend="gloo"), members))
                made.append(f"group of {members}")
            elif rng.random() < 0.06 and len(pairs) > 1:
                ours, theirs, members = pairs.pop()
                if job.rank in members:
                    dist.destroy_process_group(ours)
                    dist.destroy_process_group(theirs)
                made.append(f"end of {members}")
            else:
                ours, theirs, members = rng.choice(pairs)
                # All draw the same, whether they are in it or not.
                inner = random.Random(rng.random())
                if job.rank in members:
                    made.append(step(inner, members.index(job.rank), len(members), ours, theirs))
        end = rng.choice(["return", "destroy", "sys_exit"])
        if end == "destroy":
            dist.destroy_process_group()
        if end == "sys_exit":
            print("done", flush=True)
            sys.exit(0)
        print("done", flush=True)

    run_sequence.__name__ = f"seed_{seed}"
    return Program(run_sequence, size, (0, "^done$"))


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=int, help="of every sequence; else 2 and 4 in turn")
    options = parser.parse_args(arguments)
    end, seed, failed = time.monotonic() + options.seconds, options.seed, []
    while time.monotonic() < end:
        one = sequence(seed, options.size or (2, 4)[seed % 2])
        outcomes = run(one, "tinynccl")
        if outcomes is None:
            return None
        wrong = judge(one, outcomes)
        if wrong:
            failed.append(seed)
            print(f"sequence {seed} of {one.size} ranks:", *wrong, sep="\n", file=sys.stderr, flush=True)
        seed += 1
    print(f"{seed - options.seed - len(failed)} sequences passed, {len(failed)} failed {failed or ''}")
    return len(failed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = main(sys.argv[1:])
    if found is not None:
        sys.exit(found > 0)
