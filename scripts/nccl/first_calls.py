"""How long the first calls of a program take over the libnccl that is loaded, whose kernels may have to be compiled.

    LD_PRELOAD=$PWD/libnccl.so XDG_CACHE_HOME=$(mktemp -d) CUDA_CACHE_PATH=$(mktemp -d) torchrun --nproc-per-node 2 first_calls.py

Both caches are empty then: ours of PTX, and the driver's of machine code.
"""

import os
import time

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def first(name, call):
    began = time.monotonic()
    call()
    torch.cuda.synchronize()
    took = time.monotonic() - began
    if RANK == 0:
        print(f"{name:32} {took:6.2f} s", flush=True)
    return took


def buffer(size, dtype=torch.bfloat16):
    return torch.ones(size // dtype.itemsize, device=DEVICE, dtype=dtype)


torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl", device_id=DEVICE)
LONG = 64 << 20
SHARE = LONG // dist.get_world_size()
took = first("barrier", dist.barrier)
for size in (1 << 10, 256 << 10, 4 << 20, LONG):
    took += first(f"all_reduce, bf16, {size} B", lambda: dist.all_reduce(buffer(size)))
took += first("all_reduce, f32, 4 B", lambda: dist.all_reduce(buffer(4, torch.float32)))
took += first("broadcast, 1 MiB", lambda: dist.broadcast(buffer(1 << 20), 0))
took += first("all_gather, 64 MiB", lambda: dist.all_gather_into_tensor(buffer(LONG), buffer(SHARE)))
took += first("reduce_scatter, 64 MiB", lambda: dist.reduce_scatter_tensor(buffer(SHARE), buffer(LONG)))
if RANK == 0:
    print(f"{'all':32} {took:6.2f} s")
dist.destroy_process_group()
