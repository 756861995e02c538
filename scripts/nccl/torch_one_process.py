"""torch.cuda.nccl: one process that drives all GPUs (ncclCommInitAll and groups).

    LD_PRELOAD=$PWD/libnccl.so python3 scripts/nccl/torch_one_process.py
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import torch
import torch.cuda.nccl as nccl
from torch import nn

import client


def tensors(count, dtype=torch.float32):
    return [torch.full((count,), g + 1, dtype=dtype, device=f"cuda:{g}") for g in range(torch.cuda.device_count())]


def expect(tensor, value):
    torch.cuda.synchronize(tensor.device)
    assert bool((tensor == value).all()), f"on {tensor.device}: {tensor.flatten()[:4]}, expected {value}"


def collectives():
    n = torch.cuda.device_count()
    total = n * (n + 1) // 2
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for count in (1, 1000, 1_000_003):
            inputs = tensors(count, dtype)
            nccl.all_reduce(inputs)
            for tensor in inputs:
                expect(tensor, total)
            inputs = tensors(count, dtype)
            nccl.broadcast(inputs, root=0)
            for tensor in inputs:
                expect(tensor, 1)
            inputs = tensors(count, dtype)
            output = torch.zeros_like(inputs[0])
            nccl.reduce(inputs, output, root=0)
            expect(output, total)
            inputs = tensors(count, dtype)
            outputs = [torch.zeros(n * count, dtype=dtype, device=tensor.device) for tensor in inputs]
            nccl.all_gather(inputs, outputs)
            for output in outputs:
                for g, part in enumerate(output.chunk(n)):
                    expect(part, g + 1)
            inputs = tensors(n * count, dtype)
            outputs = [torch.zeros(count, dtype=dtype, device=tensor.device) for tensor in inputs]
            nccl.reduce_scatter(inputs, outputs)
            for output in outputs:
                expect(output, total)


def data_parallel():
    """nn.DataParallel copies a model to all GPUs by broadcasts."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to("cuda:0")
    inputs = torch.arange(64.0 * 16, device="cuda:0").view(16, 64) / 1024
    want = model(inputs)
    got = nn.DataParallel(model)(inputs)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5), (got - want).abs().max()


def body(checks):
    def library():
        torch.cuda.init()
        assert client.say_which(f"torch {torch.__version__}", linked=True), f"loaded: {client.loaded()}"

    checks.run("library", library)
    checks.run("collectives", collectives)
    checks.run("data_parallel", data_parallel)


if __name__ == "__main__":
    sys.exit(client.ranks(body, client.arguments(__doc__), size=1))
