"""Messages between two ranks."""

import torch
import torch.distributed as dist

from checks import check, equal, full


@check("test_send_recv", "test_send_recv_with_tag (in order)", "test_send_recv_all_to_all")
def send_recv(rank, n):
    right, left = (rank + 1) % n, (rank - 1) % n
    for size in (0, 1, 1000, 300_000):
        mine, theirs = full(size, float(rank)), full(size, -1.0)
        if rank == 0:
            dist.send(mine, right)
            assert dist.recv(theirs, left) == left
        else:
            dist.recv(theirs, left)
            dist.send(mine, right)
        equal(theirs, float(left))


@check("test_isend", "test_irecv", "test_batch_isend_irecv_gloo", "test_batch_isend_irecv_ring_exchange_nccl", "test_batch_isend_irecv_self_nccl (not to itself)")
def isend_irecv(rank, n):
    others = [r for r in range(n) if r != rank]
    inputs = {r: full(400_000, -1.0) for r in others}
    # All send first, more than any buffer holds.
    works = [dist.isend(full(400_000, float(rank)), r) for r in others]
    works += [dist.irecv(inputs[r], r) for r in others]
    for work in works:
        work.wait()
    for r in others:
        equal(inputs[r], float(r))
    right, left = (rank + 1) % n, (rank - 1) % n
    theirs = full(3, -1.0)
    ops = [dist.P2POp(dist.isend, full(3, float(rank)), right), dist.P2POp(dist.irecv, theirs, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    equal(theirs, float(left))


@check("test_send_recv_any_source")
def recv_any_source(rank, n):
    if rank == 0:
        found = {dist.recv(full(1, 0.0)) for _ in range(n - 1)}
        assert found == set(range(1, n))
    else:
        dist.send(full(1, float(rank)), 0)


@check("test_send_recv_with_tag (out of order)")
def tags_out_of_order(rank, n):
    right, left = (rank + 1) % n, (rank - 1) % n
    sizes = {1: 3, 2: 100_000, 3: 0, 4: 3}
    works = [dist.isend(full(size, float(tag)), right, tag=tag) for tag, size in sizes.items()]
    works += [dist.isend(full(1, 5.0, torch.float64), right, tag=1)]
    found = {tag: full(sizes[tag], 0.0) for tag in (4, 2, 3, 1)}
    works += [dist.irecv(tensor, left, tag=tag) for tag, tensor in found.items()]
    second = full(1, 0.0, torch.float64)
    works += [dist.irecv(second, left, tag=1)]
    for work in works:
        work.wait()
    for tag, tensor in found.items():
        equal(tensor, float(tag), f"tag {tag}")
    equal(second, 5.0, "the second of tag 1")
    # Tag 6 comes before anybody has asked for it.
    works = [dist.isend(full(3, float(tag)), right, tag=tag) for tag in (6, 7)]
    for tag in (7, 6):
        tensor = full(3, 0.0)
        dist.recv(tensor, left, tag=tag)
        equal(tensor, float(tag), f"tag {tag}")
    for work in works:
        work.wait()
