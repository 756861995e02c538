"""The backend "tinynccl" of ``torch.distributed``, for tensors of the CPU and of CUDA devices.

Importing it registers the backend::

    import tinynccl.torch
    torch.distributed.init_process_group("tinynccl")

Ranks meet through the store that ``init_process_group`` makes. Each process group is a communicator of its own. Works with
torch 1.13 and with torch 2.
"""

import torch.distributed as dist

from .group import ProcessGroup
from .work import Work

__all__ = ["ProcessGroup", "Work"]


def _create(store, rank, size, timeout):
    return ProcessGroup(store, rank, size, timeout)


def _register():
    if hasattr(dist.Backend, "TINYNCCL"):
        return
    try:
        dist.Backend.register_backend("tinynccl", _create, devices=["cpu", "cuda"])
    except TypeError:
        # Before torch 2.
        dist.Backend.register_backend("tinynccl", _create)


_register()
