"""Barriers and sub-groups."""

import datetime

import torch
import torch.distributed as dist

from checks import check, equal, full


@check("test_barrier_implies_wait", "test_barrier", "test_monitored_barrier_gloo (all come)")
def barrier(rank, n):
    tensors = [full(100_000, 1.0) for _ in range(8)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    for tensor in tensors:
        equal(tensor, float(n))


@check("test_all_reduce_group_sum", "test_broadcast_group", "test_barrier_group", "test_new_subgroups", "test_sub_group (multiple groups)")
def sub_groups(rank, n):
    pairs = [dist.new_group([0, r]) for r in range(1, n)]
    for r, pair in enumerate(pairs, start=1):
        if rank in (0, r):
            tensor = full(3, float(rank))
            dist.all_reduce(tensor, group=pair)
            equal(tensor, float(r))
            assert dist.get_world_size(pair) == 2 and dist.get_rank(pair) == (0 if rank == 0 else 1)
            tensor = full(3, float(rank))
            dist.broadcast(tensor, r, group=pair)
            equal(tensor, float(r))
            dist.barrier(group=pair)
    for r, pair in enumerate(pairs, start=1):
        if rank in (0, r):
            dist.destroy_process_group(pair)


# torch 1.13 makes these where CUDA is, alone.
if int(torch.__version__.split(".")[0]) >= 2:

    @check("test_new_subgroups_by_enumeration", "test_all_reduce_full_group_sum")
    def sub_groups_at_once(rank, n):
        mine, _ = dist.new_subgroups_by_enumeration([list(range(n))])
        tensor = full(3, float(rank))
        dist.all_reduce(tensor, group=mine)
        equal(tensor, n * (n - 1) / 2)
        mine, _ = dist.new_subgroups_by_enumeration([[r] for r in range(n)])
        tensor = full(3, float(rank))
        dist.all_reduce(tensor, group=mine)
        equal(tensor, float(rank))


@check("test_monitored_barrier_gloo, _subgroup (all come; the group's own method, as torch's function is for gloo alone)")
def monitored_barrier(rank, n):
    group = dist.distributed_c10d._get_default_group()
    if dist.get_backend() == "gloo":
        dist.monitored_barrier()
    else:
        group.monitored_barrier(datetime.timedelta(seconds=30))
