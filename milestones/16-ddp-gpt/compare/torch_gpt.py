"""The training of ddp-gpt in PyTorch, to compare with: DDP over NCCL or tinynccl, bf16 autocast, fused AdamW, torch.compile on demand.

    torchrun --nproc_per_node 2 compare/torch_gpt.py --data data/tinyshakespeare.txt [--backend tinynccl] [--compile default]

Same network, initial values, sequences in every batch, schedule, clipping, optimizer and evaluation as ddp-gpt's: initial
values and places in the text follow from the seed by the functions of src/rng.rs. Different: dropout's masks, which come from
PyTorch's generator, and roundings. Lines of output have ddp-gpt's form. Without torchrun it is one rank. --graph captures the
whole step into one CUDA graph, as ddp-gpt's --graph does.
"""

import argparse
import json
import math
import os
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

# context, layers, heads, channels; then batch, lr, min_lr, warm-up, dropout: src/config.rs
PRESETS = {
    "tiny": ((16, 2, 2, 16), (12, 1e-2, 1e-3, 5, 0.0)),
    "small": ((64, 4, 4, 128), (24, 3e-3, 3e-4, 100, 0.0)),
    "full": ((256, 6, 6, 384), (64, 1e-3, 1e-4, 100, 0.2)),
}
BETAS, DECAY, CLIP = (0.9, 0.99), 0.1, 1.0
INIT, BATCH, EVAL = 1, 2, 3  # rng.rs: Stream


def words(values):
    return np.asarray(values, dtype=np.uint64)


def mix64(z):
    z = (z ^ (z >> words(30))) * words(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> words(27))) * words(0x94D049BB133111EB)
    return z ^ (z >> words(31))


def key(seed, stream, *counters):
    """rng.rs: key. Counters may be arrays."""
    state = mix64(words([seed]))
    for counter in (stream, *counters):
        state = mix64((state + words(0x9E3779B97F4A7C15)) ^ mix64(words(counter)))
    return state


def starts(seed, stream, steps, batch, length):
    """data.rs: Batch::fill. Where sequences begin, [steps, batch], below `length`."""
    bits = key(seed, stream, np.arange(steps).reshape(-1, 1), np.arange(batch).reshape(1, -1))
    high, low, n = bits >> words(32), bits & words(0xFFFFFFFF), words(length)
    return ((high * n + (low * n >> words(32))) >> words(32)).astype(np.int64)


def normal(seed, tensor, count):
    """params.rs: initialise."""
    counters = key(seed, INIT, tensor) + np.arange(count + count % 2, dtype=np.uint64)
    uniform = (mix64(counters) >> words(11)).astype(np.float64) / 2.0**53
    radius, angle = np.sqrt(-2.0 * np.log(1.0 - uniform[0::2])), 2.0 * math.pi * uniform[1::2]
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=-1).reshape(-1)[:count]


class Norm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight)


def attend(q, k, v, dropout):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    # PyTorch before 2.0, for the test on a CPU.
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return F.dropout(scores.masked_fill(future, -math.inf).softmax(-1), dropout) @ v


class Attention(nn.Module):
    def __init__(self, channels, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn = nn.Linear(channels, 3 * channels, bias=False)
        self.c_proj = nn.Linear(channels, channels, bias=False)

    def forward(self, x):
        samples, context, channels = x.shape
        parts = self.c_attn(x).split(channels, dim=2)
        q, k, v = (part.view(samples, context, self.heads, channels // self.heads).transpose(1, 2) for part in parts)
        y = attend(q, k, v, self.dropout if self.training else 0.0)
        y = self.c_proj(y.transpose(1, 2).reshape(samples, context, channels))
        return F.dropout(y, self.dropout, self.training)


class Mlp(nn.Module):
    def __init__(self, channels, dropout):
        super().__init__()
        self.dropout = dropout
        self.c_fc = nn.Linear(channels, 4 * channels, bias=False)
        self.c_proj = nn.Linear(4 * channels, channels, bias=False)

    def forward(self, x):
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, channels, heads, dropout):
        super().__init__()
        self.ln_1, self.attn = Norm(channels), Attention(channels, heads, dropout)
        self.ln_2, self.mlp = Norm(channels), Mlp(channels, dropout)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, shape, vocab, dropout, seed):
        super().__init__()
        context, layers, heads, channels = shape
        self.dropout = dropout
        self.wte, self.wpe = nn.Embedding(vocab, channels), nn.Embedding(context, channels)
        self.h = nn.ModuleList(Block(channels, heads, dropout) for _ in range(layers))
        self.ln_f = Norm(channels)
        for i, (name, p) in enumerate(self.named_parameters()):
            if p.dim() == 2:
                deviation = 0.02 / math.sqrt(2 * layers) if "c_proj" in name else 0.02
                values = (normal(seed, i, p.numel()) * deviation).astype(np.float32)
                p.data.copy_(torch.from_numpy(values).view_as(p))

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def learning_rate(step, steps, lr, low, warmup):
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(steps - warmup, 1)
    return low + 0.5 * (1 + math.cos(math.pi * progress)) * (lr - low)


class Eager:
    """Steps launched one kernel at a time."""

    def __init__(self, update, optimizer, schedule):
        self.update, self.optimizer, self.schedule, self.losses = update, optimizer, schedule, []

    def step(self, step):
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule[step]
        self.losses.append(self.update(step))
        self.optimizer.zero_grad(set_to_none=True)


class Graphed:
    """The first steps as usual, then one graph of a step, which counts for itself where it is."""

    EAGER = 12  # DDP measures itself in the first 11, which a capture forbids

    def __init__(self, update, optimizer, schedule, stream):
        device = optimizer.param_groups[0]["params"][0].device
        self.update, self.optimizer, self.stream, self.graph = update, optimizer, stream, None
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.schedule = torch.tensor(schedule, dtype=torch.float32, device=device)
        self.losses = torch.zeros(len(schedule), device=device)

    def once(self):
        for group in self.optimizer.param_groups:
            group["lr"].copy_(self.schedule.index_select(0, self.at).squeeze(0))
        self.losses.index_copy_(0, self.at, self.update(self.at).view(1))
        self.at += 1

    def step(self, step):
        if step < self.EAGER:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.optimizer.zero_grad(set_to_none=True)
                self.once()
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.once()
        self.graph.replay()

    def close(self):
        """NCCL's communicator cannot end before the graphs that hold its calls."""
        torch.cuda.synchronize()
        if self.graph:
            self.graph.reset()
        self.graph = None


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", required=True)
    p.add_argument("--preset", choices=PRESETS, default="full")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--backend", choices=("nccl", "gloo", "tinynccl"), help="of torch.distributed; nccl on GPUs, else gloo")
    p.add_argument("--steps", type=int, default=3000)
    p.add_argument("--batch", type=int, help="sequences per step over all ranks; the preset's own when absent")
    p.add_argument("--dropout", type=float)
    p.add_argument("--lr", type=float, help="peak learning rate; a tenth of it is the lowest")
    p.add_argument("--seed", type=int, default=1337)
    p.add_argument("--eval-every", type=int, default=250)
    p.add_argument("--eval-batches", type=int, default=20)
    p.add_argument("--compile", metavar="MODE", help="torch.compile's mode: default, reduce-overhead, max-autotune...")
    p.add_argument("--graph", action="store_true", help="the whole step as one CUDA graph")
    p.add_argument("--history", metavar="FILE", help="every loss, as JSON")
    return p.parse_args()


def main():
    a = arguments()
    shape, (batch, lr, low, warmup, dropout) = PRESETS[a.preset]
    batch, dropout = a.batch or batch, dropout if a.dropout is None else a.dropout
    if a.lr:
        lr, low = a.lr, a.lr / 10
    warmup = min(warmup, a.steps // 10)
    context, gpu = shape[0], a.device == "cuda"
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if batch % size:
        raise SystemExit(f"--batch {batch} is not a multiple of {size} ranks")
    if gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if a.graph:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # it asks events, which a capture forbids
    if size > 1:
        backend = a.backend or ("nccl" if gpu else "gloo")
        if backend == "tinynccl":
            import tinynccl.torch  # noqa: F401, registers the backend
        # Only backends of torch's own are set up before their first call, which is what device_id is for.
        dist.init_process_group(backend, **({"device_id": device} if backend == "nccl" else {}))
    torch.manual_seed(a.seed + rank)  # dropout

    def say(line):
        if rank == 0:
            print(line, flush=True)

    def sync():
        if gpu:
            torch.cuda.synchronize()

    def over_ranks(value):
        if size > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= size
        return value

    with open(a.data, encoding="utf-8") as file:
        text = file.read()
    vocabulary = sorted(set(text))
    number = {c: i for i, c in enumerate(vocabulary)}
    tokens = torch.tensor([number[c] for c in text], device=device)
    split = len(text) - len(text) // 10
    share = slice(rank * (batch // size), (rank + 1) * (batch // size))
    offsets = torch.arange(context, device=device)

    def sequences(part, stream, count):
        begins = starts(a.seed, stream, count, batch, len(part) - context)[:, share]
        begins = torch.from_numpy(np.ascontiguousarray(begins)).to(device).unsqueeze(-1)

        def take(i):
            at = (begins.index_select(0, i).squeeze(0) if torch.is_tensor(i) else begins[i]) + offsets
            return part[at], part[at + 1]

        return take

    training = sequences(tokens[:split], BATCH, a.steps)
    validation = sequences(tokens[split:], EVAL, a.eval_batches)

    model = Gpt(shape, len(vocabulary), dropout, a.seed).to(device)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = {"fused": True, "capturable": a.graph} if gpu else {}
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(lr, device=device) if a.graph else lr, betas=BETAS, **fused)
    # A graph must be captured on the stream that DDP was made on.
    stream = torch.cuda.Stream() if a.graph else None
    step_of = model
    if size > 1:
        where = {"device_ids": [device.index]} if gpu else {}
        with torch.cuda.stream(stream):
            step_of = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **where)
    if a.compile:
        step_of = torch.compile(step_of, mode=a.compile)
    autocast = torch.autocast(a.device, torch.bfloat16, enabled=gpu)

    def update(step):
        with autocast:
            loss = step_of(*training(step))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.detach()

    schedule = [learning_rate(step, a.steps, lr, low, warmup) for step in range(a.steps)]
    run = Graphed(update, optimizer, schedule, stream) if a.graph else Eager(update, optimizer, schedule)

    @torch.no_grad()
    def evaluate():
        model.eval()
        with autocast:
            total = sum(model(*validation(i)) for i in range(a.eval_batches))
        model.train()
        return over_ranks(total / a.eval_batches).item()

    count = sum(p.numel() for p in parameters)
    over = f" over {dist.get_backend()}" if size > 1 else ""
    way = (f"compiled ({a.compile})" if a.compile else "eager") + ", one graph" * a.graph
    say(f"PyTorch {torch.__version__}, {way}: {a.preset} preset, {count * 1e-6:.2f} M parameters, {size} ranks{over}, "
        f"{a.steps} steps of {batch} x {context} characters")
    evaluations, rates, spent, timed = [], [], 0.0, 0
    begun = time.perf_counter()
    for step in range(a.steps):
        if step % a.eval_every == 0:
            evaluations.append((step, evaluate()))
            say(f"step {step:5}  validation loss {evaluations[-1][1]:.4f}")
            sync()
            first, start = step, time.perf_counter()
        run.step(step)
        done = step + 1
        if done % a.eval_every == 0 or done == a.steps:
            sync()
            elapsed = time.perf_counter() - start
            rates.append((done - first) / elapsed)
            if first > 0:  # the first stretch compiles and warms up
                spent, timed = spent + elapsed, timed + done - first
            mean = over_ranks(run.losses[step]).item()
            say(f"step {done:5}/{a.steps}  loss {mean:.4f}  lr {schedule[step]:.2e}  {rates[-1]:.1f} steps/s")
    evaluations.append((a.steps, evaluate()))
    say(f"step {a.steps:5}  validation loss {evaluations[-1][1]:.4f}")
    if timed:
        say(f"{timed / spent:.1f} steps/s, {1e3 * spent / timed:.3f} ms a step; "
            f"median of {len(rates)} stretches {statistics.median(rates):.1f} steps/s")
    say(f"done in {time.perf_counter() - begun:.0f} s")
    history = over_ranks(torch.stack(list(run.losses)).double()).tolist()
    if a.history and rank == 0:
        with open(a.history, "w", encoding="utf-8") as file:
            json.dump({"train": history, "validation": evaluations}, file)
    if a.graph:
        run.close()
    if size > 1:
        dist.destroy_process_group()


main()
