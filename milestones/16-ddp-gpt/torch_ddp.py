"""The full preset in PyTorch with DDP and NCCL, to compare with: the same network, batch, schedule and optimizer as ddp-gpt's.

    torchrun --nproc_per_node 2 milestones/16-ddp-gpt/torch_ddp.py data/tinyshakespeare.txt [steps] [eager]
"""
import math
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

LAYERS, HEADS, C, T, BATCH, DROPOUT = 6, 6, 384, 256, 64, 0.2
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 3000
LR, MIN_LR, WARMUP = 1e-3, 1e-4, 100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.qkv, self.attention_out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.mlp_in, self.mlp_out = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, C // HEADS).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(C, dim=2))
        p = DROPOUT if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + F.dropout(self.attention_out(y.transpose(1, 2).reshape(b, t, C)), DROPOUT, self.training)
        y = self.mlp_out(F.gelu(self.mlp_in(self.ln_2(x)), approximate="tanh"))
        return x + F.dropout(y, DROPOUT, self.training)


class Gpt(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, C), nn.Embedding(T, C)
        self.blocks, self.ln_f = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(C, bias=False)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if "_out" in name else 0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))
        x = F.dropout(x, DROPOUT, self.training)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def rate(step):
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) * (LR - MIN_LR)


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(1337 + rank)
    torch.set_float32_matmul_precision("high")
    text = open(sys.argv[1], encoding="utf-8").read()
    chars = sorted(set(text))
    data = torch.tensor([chars.index(c) for c in text], device="cuda")
    parts = {True: data[: len(data) - len(data) // 10], False: data[len(data) - len(data) // 10 :]}

    def batch(train):
        part = parts[train]
        at = torch.randint(len(part) - T, (BATCH, 1), device="cuda") + torch.arange(T, device="cuda")
        return part[at], part[at + 1]

    model = Gpt(len(chars)).cuda()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), fused=True)
    plain = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    model = plain if "eager" in sys.argv else torch.compile(plain)

    def mean(value):
        dist.all_reduce(value, dist.ReduceOp.AVG)
        return value.item()

    def evaluate():
        plain.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            loss = torch.stack([plain.module(*batch(False)) for _ in range(20)]).mean()
        plain.train()
        return mean(loss)

    begun, spent, start = time.time(), 0.0, None
    for step in range(STEPS):
        if step == 20:  # compiled and warm
            torch.cuda.synchronize()
            start = time.time()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(*batch(True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= 20 and (step + 1) % 500 == 0:
            torch.cuda.synchronize()
            spent += time.time() - start
            line = f"step {step + 1}: loss {mean(loss.detach()):.4f}, validation {evaluate():.4f}"
            if rank == 0:
                print(f"{line}, {(step + 1 - 20) / spent:.1f} steps/s, {time.time() - begun:.1f} s in all", flush=True)
            torch.cuda.synchronize()
            start = time.time()
    dist.destroy_process_group()


main()
