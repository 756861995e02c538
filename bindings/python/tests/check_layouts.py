"""Tensors whose memory is not what torch reads: lazily conjugated or negated, transposed, expanded, leaves of a graph."""

import torch
import torch.distributed as dist

from checks import check, device, equal, full


def conjugated(shape, value):
    """As torch reads it: ``value``."""
    return torch.full(shape, value.conjugate(), dtype=torch.complex64, device=device()).conj()


def negated(shape, value):
    """The imaginary part of something conjugated: torch reads ``value``, the memory has its negative, with gaps."""
    tensor = conjugated(shape, complex(0, value)).imag
    assert tensor.is_neg()
    return tensor


def packed_negated(shape, value):
    tensor = torch._neg_view(full(shape, -value))
    assert tensor.is_neg() and tensor.is_contiguous()
    return tensor


def channels_last(shape, value):
    count = torch.Size(shape).numel()
    return (torch.arange(count, device=device(), dtype=torch.float32).view(shape) + value).to(memory_format=torch.channels_last)


def in_every_way(rank, n, make, value_of, what):
    """Every entry, with the odd tensor at one rank, elsewhere plain ones of the same values."""
    shape = (n, 2, 3, 2)

    def mine(r=rank, odd=n - 1):
        tensor = make(shape, value_of(r))
        plain = torch.empty(shape, dtype=tensor.dtype, device=device()).copy_(tensor)
        return tensor if rank == odd else plain

    def value(r):
        return torch.empty(shape, dtype=mine().dtype, device=device()).copy_(make(shape, value_of(r)))

    total = sum(value(r) for r in range(n))
    for odd in {0, n - 1}:
        tensor = mine(odd=odd)
        dist.all_reduce(tensor, async_op=True).wait()
        equal(tensor, total, f"all_reduce async {what}")
        tensor = mine(odd=odd)
        dist.all_reduce(tensor)
        equal(tensor, total, f"all_reduce {what}")
        tensors = [mine(odd=odd), mine(odd=odd)]
        dist.all_reduce_coalesced(tensors)
        for tensor in tensors:
            equal(tensor, total, f"all_reduce_coalesced {what}")
        tensor = mine(odd=odd)
        dist.broadcast(tensor, n - 1)
        equal(tensor, value(n - 1), f"broadcast {what}")
        tensor = mine(odd=odd)
        dist.reduce(tensor, n - 1)
        equal(tensor, total if rank == n - 1 else value(rank), f"reduce {what}")
        outputs = [mine(odd=odd) for _ in range(n)]
        dist.all_gather(outputs, mine(odd=odd))
        for r, output in enumerate(outputs):
            equal(output, value(r), f"all_gather {what}")
        outputs = [[mine(odd=odd)] for _ in range(n)]
        dist.all_gather_coalesced(outputs, [mine(odd=odd)])
        for r, (output,) in enumerate(outputs):
            equal(output, value(r), f"all_gather_coalesced {what}")
        outputs = [mine(odd=odd) for _ in range(n)] if rank == 0 else None
        dist.gather(mine(odd=odd), outputs, 0)
        for r, output in enumerate(outputs or []):
            equal(output, value(r), f"gather {what}")
        output = mine(odd=odd)
        dist.scatter(output, [mine(r, odd) for r in range(n)] if rank == n - 1 else None, n - 1)
        equal(output, value(rank), f"scatter {what}")
        output = mine(odd=odd)
        dist.reduce_scatter(output, [mine(odd=odd) for _ in range(n)])
        equal(output, total, f"reduce_scatter {what}")
        outputs = [mine(odd=odd) for _ in range(n)]
        dist.all_to_all(outputs, [mine(odd=odd) for _ in range(n)])
        for r, output in enumerate(outputs):
            equal(output, value(r), f"all_to_all {what}")
        output = mine(odd=odd)
        dist.all_to_all_single(output, mine(odd=odd))
        for r in range(n):
            equal(output[r], value(r)[rank], f"all_to_all_single {what}")
        scattered, gathered = getattr(dist, "reduce_scatter_tensor", None), getattr(dist, "all_gather_into_tensor", None)
        output = mine(odd=odd)[0]
        (scattered or dist._reduce_scatter_base)(output, mine(odd=odd))
        equal(output, total[rank], f"reduce_scatter_tensor {what}")
        output = mine(odd=odd)
        (gathered or dist._all_gather_base)(output, mine(odd=odd)[0])
        for r in range(n):
            equal(output[r], value(r)[0], f"all_gather_into_tensor {what}")
        right, left = (rank + 1) % n, (rank - 1) % n
        theirs = mine(odd=odd)
        sent = dist.isend(mine(odd=odd), right)
        dist.recv(theirs, left)
        sent.wait()
        equal(theirs, value(left), f"send and recv {what}")
        if device().type == "cpu":
            theirs = mine(odd=odd)
            sent = dist.isend(mine(odd=odd), right)
            assert dist.recv(theirs) == left or n > 2
            sent.wait()
            dist.barrier()


@check("test_all_reduce_sum_complex, test_all_to_all_complex, test_allgather_complex with lazily conjugated tensors")
def conjugated_tensors(rank, n):
    """By the group's own methods where torch's functions refuse them: DDP, hooks and others call these."""
    group = dist.distributed_c10d._get_default_group()
    if dist.get_backend() != "tinynccl":
        group = None
    shape, total = (n, 3), complex(n * (n - 1) // 2, n * (n + 1) // 2)

    def value(r=rank):
        return complex(r, r + 1)

    for odd in {0, n - 1}:

        def mine(r=rank):
            return conjugated(shape, value(r)) if rank == odd else full(shape, value(r), torch.complex64)

        if group is not None:
            one, two = mine(), mine()
            group.allreduce([one]).wait()
            group.allreduce_coalesced([two, mine()]).wait()
            equal(one, total)
            equal(two, total)
            one = mine()
            group.broadcast([one], n - 1).wait()
            equal(one, value(n - 1))
            parts = [mine() for _ in range(n)]
            group.allgather([parts], [mine()]).wait()
            for r, part in enumerate(parts):
                equal(part, value(r))
            one = mine()
            group.reduce_scatter([one], [[mine() for _ in range(n)]]).wait()
            equal(one, total)
            one = mine()[0]
            group._reduce_scatter_base(one, mine()).wait()
            equal(one, total)
            one = mine()
            group._allgather_base(one, mine()[0]).wait()
            for r in range(n):
                equal(one[r], value(r))
            group.scatter([one], [[mine(r) for r in range(n)]] if rank == 0 else []).wait()
            equal(one, value())
            one = mine()
            group.alltoall_base(one, mine(), [], []).wait()
            for r in range(n):
                equal(one[r], value(r))
        parts = [mine() for _ in range(n)] if rank == 0 else None
        dist.gather(mine(), parts, 0)
        for r, part in enumerate(parts or []):
            equal(part, value(r), "gather")
        one, sent = mine(), dist.isend(mine(), (rank + 1) % n)
        dist.recv(one, (rank - 1) % n)
        sent.wait()
        equal(one, value((rank - 1) % n), "recv")


@check("the same with lazily negated ones")
def negated_tensors(rank, n):
    in_every_way(rank, n, negated, lambda r: float(r + 1), "negated with gaps")
    in_every_way(rank, n, packed_negated, lambda r: float(r + 1), "negated")
    # One element with a stride counts as contiguous.
    one, sent = full(1, 0.0), dist.isend(full((1, 2), float(rank))[:, 0], (rank + 1) % n)
    dist.recv(one, (rank - 1) % n)
    sent.wait()
    equal(one, float((rank - 1) % n))


@check("test_channels_last (reducer), tensors of other layouts than the other ranks'")
def other_layouts(rank, n):
    in_every_way(rank, n, channels_last, lambda r: float(r), "channels_last")
    in_every_way(rank, n, lambda shape, value: (full(shape[::-1], value)).permute(3, 2, 1, 0), lambda r: float(r), "transposed")
    in_every_way(rank, n, lambda shape, value: full([2 * size for size in shape], value)[[slice(None, None, 2)] * 4], float, "sliced")
    # Read only, an element may stand for many.
    parts = [full((4, 6), 0.0) for _ in range(n)]
    dist.all_gather(parts, full((1,), float(rank)).expand(4, 6))
    for r, part in enumerate(parts):
        equal(part, float(r))


@check("test_all_reduce_coalesced_max_complex_unsupported (a leaf that requires a gradient)")
def leaves_of_a_graph(rank, n):
    for make in (lambda: full((2, 3), float(rank)), lambda: full((3, 2), float(rank)).t()):
        leaf = make().requires_grad_()
        dist.all_reduce(leaf)
        equal(leaf.detach(), n * (n - 1) / 2)
        leaves = [make().requires_grad_() for _ in range(n)]
        dist.all_gather(leaves, make())
        for r, one in enumerate(leaves):
            equal(one.detach(), float(r))
            assert one.is_leaf and one.requires_grad
    with torch.inference_mode():
        parts = [full(3, 0.0) for _ in range(n)]
    work = dist.all_gather(parts, full(3, float(rank)), async_op=True)
    work.wait()
    for r, part in enumerate(parts):
        equal(part, float(r))
