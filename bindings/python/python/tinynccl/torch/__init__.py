"""The backend "tinynccl" of ``torch.distributed``, for tensors of the CPU and of CUDA devices.

Importing it registers the backend::

    import tinynccl.torch
    torch.distributed.init_process_group("tinynccl")

Ranks meet through the store that ``init_process_group`` makes. Each process group is a communicator of its own. Works with
torch 1.13 and with torch 2.
"""

import torch
import torch.distributed as dist

from . import collectives, group, meet, messages, reconfigure, streams, survive, tensors, work
from .group import Backend, ProcessGroup
from .survive import grow, join, shrink, ticket, waiting
from .untraced import leave_untraced
from .work import Work

__all__ = ["Backend", "ProcessGroup", "Work", "grow", "join", "shrink", "ticket", "waiting"]


def _create(store, rank, size, timeout):
    return ProcessGroup(store, rank, size, timeout)


def _create_2(opts, options=None):
    """Of torch 2, which makes a group first: what is returned takes its place (a group) or a place in it (a backend)."""
    group = getattr(opts, "process_group", None)
    # Another backend has its place there already, or will have the one for calls without tensors.
    alone = group is None or not group._device_types and group._get_backend_name() not in ("gloo", "nccl", "mpi", "ucc", "xccl")
    if not alone and Backend is None:
        raise RuntimeError(
            f"init_process_group: torch {torch.__version__} has no backends made in Python, so \"tinynccl\" cannot be one of several: "
            'pass "tinynccl" alone'
        )
    members = getattr(opts, "global_ranks_in_group", None)
    place = (opts.store, opts.group_rank, opts.group_size, opts.timeout, members)
    # torch refuses to reconfigure a group of several backends.
    return ProcessGroup(*place, getattr(opts, "enable_reconfigure", False)) if alone else Backend(*place)


def _register():
    if hasattr(dist.Backend, "TINYNCCL"):
        return
    if hasattr(dist.ProcessGroup, "_device_types"):
        dist.Backend.register_backend("tinynccl", _create_2, extended_api=True, devices=["cpu", "cuda"])
    else:
        # Before torch 2.
        dist.Backend.register_backend("tinynccl", _create)


_register()
leave_untraced(collectives, group, meet, messages, reconfigure, streams, survive, tensors, work)
