"""Calls that cannot be right."""

import torch
import torch.distributed as dist

from checks import check, device, equal, full


@check("test_allreduce_checks (sparse, strides, devices)", "test_broadcast_checks", "test_gather_checks", "test_scatter_checks")
def refused(rank, n):
    """Exceptions before anything is sent; the group works on."""
    sparse = torch.eye(3).to(device()).to_sparse()
    strided = full((4, 6), 1.0).t()
    cases = [
        (lambda: dist.all_reduce(strided), ["not contiguous", "contiguous"]),
        (lambda: dist.all_gather([full(2, 0.0)] * (n + 1), full(2, 0.0)), [f"{n + 1} output tensors", ""]),
        (lambda: dist.all_gather([full(2, 0.0, torch.float64)] * n, full(2, 0.0)), ["float64", ""]),
        (lambda: dist.scatter(full(2, 0.0), [full(3, 0.0)] * n if rank == 0 else None) if rank == 0 else dist.all_reduce(strided), ["", ""]),
        (lambda: dist.all_reduce(full(2, 1.0), dist.ReduceOp.BAND), ["band of f32", ""]),
    ]
    if dist.get_backend() == "tinynccl":
        cases.append((lambda: dist.broadcast(sparse, 0), ["torch.sparse_coo, expected torch.strided", ""]))
        # Sums are for the CPU alone.
        words = "max of a sparse tensor" if device().type == "cpu" else "torch.sparse_coo, expected torch.strided"
        cases.append((lambda: dist.all_reduce(sparse, dist.ReduceOp.MAX), [words, ""]))
        meta = torch.zeros(2, device="meta")
        cases.append((lambda: dist.all_gather([full(2, 0.0)] * (n - 1) + [meta], full(2, 0.0)), ["on meta", ""]))
        cases.append((lambda: dist.all_reduce_coalesced([full(2, 0.0), meta]), ["tensor 1 on meta", ""]))
        for call in (
            lambda: dist.broadcast(strided, 0),
            lambda: dist.reduce(strided, 0),
            lambda: dist.gather(strided, [full((6, 4), 0.0)] * n if rank == 0 else None),
            lambda: dist.send(strided, (rank + 1) % n),
            lambda: dist.recv(strided, (rank + 1) % n),
            lambda: dist.all_to_all_single(strided, full((6, 4), 0.0)) if n != 5 else None,
        ):
            cases.append((call, ["contiguous", ""]))
        cases.append((lambda: dist.all_reduce(torch.zeros(2, device="meta")), ["meta", ""]))
        # Real and imaginary parts apart make sums, and no products.
        complex_ones = full(2, 1.0, torch.complex64)
        cases.append((lambda: dist.reduce(complex_ones, 0, dist.ReduceOp.PRODUCT), ["prod of torch.complex64", ""]))
    ours = dist.get_backend() == "tinynccl"
    for call, words in cases:
        try:
            call()
        except (RuntimeError, ValueError, TypeError) as error:
            assert not ours or words[0] in str(error), f"{words}: {error}"
        else:
            raise AssertionError(f"not refused: {words}")
    tensor = full(1, 1.0)
    dist.all_reduce(tensor)
    equal(tensor, float(n))
