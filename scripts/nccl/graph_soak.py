"""CUDA graphs over the libnccl that is loaded, for minutes: random calls, sizes, types and groups, replayed and compared.

    LD_PRELOAD=$PWD/libnccl.so python3 scripts/nccl/graph_soak.py --minutes 60 [--seed 1]

Two processes, a GPU each. A line per minute. Several graphs are alive at once and are replayed in random order, among calls
outside of graphs; each graph's results are compared after its last replay. A wait without end fails the minute (--limit).
"""

import datetime
import os
import random
import sys
import time

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import torch
import torch.distributed as dist

import client

KINDS = ["all_reduce", "bucket", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "ring"]
TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8]
ALIVE = 4


class Call:
    """One call of a graph: its buffers, what it does, and what it must give after `fill(step)`."""

    def __init__(self, random, group, rank, n):
        self.group, self.rank, self.n = group, rank, n
        self.kind, self.dtype = random.choice(KINDS), random.choice(TYPES)
        # Sizes of every protocol, and odd ones.
        self.count = max(1, int(2 ** random.uniform(0, 21))) | random.choice([0, 1])
        self.root = random.randrange(n)
        parts_in = n if self.kind in ("reduce_scatter", "all_to_all") else 1
        parts_out = n if self.kind in ("all_gather", "all_to_all") else 1
        self.input = torch.zeros(parts_in * self.count, dtype=self.dtype, device="cuda")
        self.output = torch.zeros(parts_out * self.count, dtype=self.dtype, device="cuda")

    def fill(self, step):
        """Part p of rank r becomes step + r + p, which fits into every type with its sum."""
        self.step = step % 20
        parts = self.input.numel() // self.count
        for p in range(parts):
            self.input[p * self.count : (p + 1) * self.count].fill_(self.step + self.rank + p)

    def run(self):
        if self.kind == "all_reduce":
            self.output.copy_(self.input)
            dist.all_reduce(self.output, group=self.group)
        elif self.kind == "bucket":
            self.output.copy_(self.input)
            with dist._coalescing_manager(group=self.group, device=self.output.device):
                for part in self.output.chunk(5):
                    dist.all_reduce(part, group=self.group)
        elif self.kind == "broadcast":
            self.output.copy_(self.input)
            dist.broadcast(self.output, self.root, group=self.group)
        elif self.kind == "all_gather":
            dist.all_gather_into_tensor(self.output, self.input, group=self.group)
        elif self.kind == "reduce_scatter":
            dist.reduce_scatter_tensor(self.output, self.input, group=self.group)
        elif self.kind == "all_to_all":
            dist.all_to_all_single(self.output, self.input, group=self.group)
        else:
            right, left = (self.rank + 1) % self.n, (self.rank - 1) % self.n
            messages = [dist.P2POp(dist.isend, self.input, right, self.group), dist.P2POp(dist.irecv, self.output, left, self.group)]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

    def check(self):
        n, step, rank = self.n, self.step, self.rank
        total = n * step + n * (n - 1) // 2
        wants = {
            "all_reduce": [total],
            "bucket": [total],
            "broadcast": [step + self.root],
            "all_gather": [step + r for r in range(n)],
            "reduce_scatter": [total + n * rank],
            "all_to_all": [step + r + rank for r in range(n)],
            "ring": [step + (rank - 1) % n],
        }[self.kind]
        for part, want in zip(self.output.split(self.count), wants):
            wrong = int((part != want).sum())
            assert not wrong, f"{self.kind} of {self.count} x {self.dtype}: {wrong} wrong, expected {want}, found {part.unique()[:4].tolist()}"


class Graph:
    def __init__(self, random, groups, rank, n):
        self.calls = [Call(random, random.choice(groups), rank, n) for _ in range(random.randint(1, 6))]
        # Groups on streams of their own: their calls have no order among them.
        self.streams = [torch.cuda.Stream() for _ in range(random.choice([0, 1]))]
        self.fill(0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.body()
        self.check()

    def body(self):
        main = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(main)
        first = self.calls[0].group
        for call in self.calls:
            # A group's calls stay on one stream, in the same order on all ranks.
            with torch.cuda.stream(self.streams[0] if self.streams and call.group is not first else main):
                call.run()
        for stream in self.streams:
            main.wait_stream(stream)

    def fill(self, step):
        for call in self.calls:
            call.fill(step)

    def check(self):
        torch.cuda.synchronize()
        for call in self.calls:
            call.check()


def minute(state, until, rank, n):
    random, groups, graphs = state["random"], state["groups"], state["graphs"]
    plain = torch.zeros(1001, device="cuda")
    while True:
        # Rank 0's clock counts for all.
        more = torch.tensor([float(rank == 0 and time.monotonic() < until)], device="cuda")
        dist.all_reduce(more)
        if not more.item():
            break
        if len(graphs) == ALIVE:
            graphs.pop(random.randrange(ALIVE))
        graphs.append(Graph(random, groups, rank, n))
        for _ in range(random.randint(1, 12)):
            graph = random.choice(graphs)
            for step in range(random.randint(1, 20)):
                graph.fill(step + state["replays"])
                graph.graph.replay()
            state["replays"] += step + 1
            if random.random() < 0.3:
                plain.fill_(rank)
                dist.all_reduce(plain)
            graph.check()
        state["graphs_made"] += 1


def soak(checks):
    rank, n, options = checks.rank, checks.size, checks.options
    torch.cuda.set_device(rank)
    state = {"random": random.Random(options.seed), "graphs": [], "replays": 0, "graphs_made": 0}

    def begin():
        timeout = datetime.timedelta(seconds=options.limit)
        init = f"file://{checks.folder}/store"
        dist.init_process_group("nccl", init_method=init, rank=rank, world_size=n, timeout=timeout, device_id=torch.device("cuda", rank))
        state["groups"] = [dist.group.WORLD, dist.new_group()]
        assert client.say_which(f"torch {torch.__version__} rank {rank}", linked=True), f"loaded: {client.loaded()}"

    checks.run("begin", begin)
    end = time.monotonic() + 60 * options.minutes
    number = 0
    while number < options.minutes and not checks.failed:
        number += 1
        checks.run(f"minute_{number}", minute, state, min(end, time.monotonic() + 60), rank, n)
    if rank == 0:
        print(f"note graph_soak: seed {options.seed}, {state['graphs_made']} graphs, {state['replays']} replays", flush=True)


if __name__ == "__main__":
    options = client.arguments(
        __doc__,
        minutes={"type": float, "default": 1.0, "help": "how long"},
        seed={"type": int, "default": 1, "help": "of the random choices, the same on all ranks"},
    )
    # A minute of calls, and what a wait may take on top of it.
    options.limit = max(options.limit, 60) + 60
    sys.exit(client.ranks(soak, options))
