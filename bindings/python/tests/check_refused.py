"""Calls that cannot be right."""

import torch
import torch.distributed as dist

from checks import check, device, equal, full


@check("test_allreduce_checks (sparse, strides, devices)", "test_broadcast_checks", "test_gather_checks", "test_scatter_checks")
def refused(rank, n):
    """Exceptions before anything is sent; the group works on."""
    sparse = torch.eye(3).to(device()).to_sparse()
    one_row = full(6, 1.0).expand(4, 6)
    cases = [
        (lambda: dist.all_gather([full(2, 0.0)] * (n + 1), full(2, 0.0)), [f"{n + 1} output tensors", ""]),
        (lambda: dist.all_gather([full(2, 0.0, torch.float64)] * n, full(2, 0.0)), ["float64", ""]),
        (lambda: dist.scatter(full(2, 0.0), [full(3, 0.0)] * n if rank == 0 else None) if rank == 0 else dist.scatter(one_row), ["", ""]),
        (lambda: dist.all_reduce(full(2, 1.0), dist.ReduceOp.BAND), ["band of f32", ""]),
    ]
    if dist.get_backend() == "tinynccl":
        cases.append((lambda: dist.broadcast(sparse, 0), ["torch.sparse_coo, expected torch.strided", ""]))
        # Sums are for the CPU alone.
        words = "max of a sparse tensor" if device().type == "cpu" else "torch.sparse_coo, expected torch.strided"
        cases.append((lambda: dist.all_reduce(sparse, dist.ReduceOp.MAX), [words, ""]))
        meta = torch.zeros(2, device="meta")
        cases.append((lambda: dist.all_gather([full(2, 0.0)] * (n - 1) + [meta], full(2, 0.0)), ["on meta", ""]))
        cases.append((lambda: dist.all_reduce_coalesced([full(2, 0.0), meta]), ["tensor 1 is on meta", ""]))
        # Values have no places of their own to be written to.
        for call in (
            lambda: dist.all_reduce(one_row),
            lambda: dist.all_reduce_coalesced([full(2, 0.0), one_row]),
            lambda: dist.broadcast(one_row, 0),
            lambda: dist.all_gather([one_row] * n, full((4, 6), 0.0)),
            lambda: dist.all_to_all_single(one_row, full((4, 6), 0.0)) if n == 2 else dist.broadcast(one_row, 0),
            lambda: dist.recv(one_row, (rank + 1) % n),
            lambda: dist.recv(torch.as_strided(full(5, 0.0), (2, 4), (1, 1)), (rank + 1) % n),
        ):
            cases.append((call, ["elements that share memory", ""]))
        # More than their memory, or none.
        quantized = torch.quantize_per_tensor(torch.ones(n), 0.1, 0, torch.quint8)
        cases.append((lambda: dist.broadcast(quantized, 0), ["quantized", ""]))
        cases.append((lambda: dist.send(quantized, (rank + 1) % n), ["quantized", ""]))
        if hasattr(torch, "nested_tensor"):
            nested = torch.nested_tensor([torch.ones(2), torch.ones(3)])
            cases.append((lambda: dist.all_reduce(nested), ["nested", ""]))
            cases.append((lambda: dist.broadcast(nested, 0), ["nested", ""]))
        # The communicator itself copies nothing, so it refuses what torch reads otherwise.
        comm = dist.distributed_c10d._get_default_group().comm
        ones = torch.ones(3, dtype=torch.complex64)
        cases.append((lambda: comm.broadcast(ones.conj()), ["conjugate bit", ""]))
        cases.append((lambda: comm.send(ones.conj(), (rank + 1) % n), ["conjugate bit", ""]))
        cases.append((lambda: comm.all_reduce(torch._neg_view(torch.ones(3))), ["negative bit", ""]))
        cases.append((lambda: comm.all_gather(torch.ones(2), torch._neg_view(torch.ones(2 * n))), ["negative bit", ""]))
        cases.append((lambda: comm.broadcast(quantized), ["quantized", ""]))
        cases.append((lambda: comm.all_reduce(freed), ["without memory", ""]))
        freed = torch.ones(3)
        freed.storage().resize_(0)
        cases.append((lambda: dist.all_reduce(freed), ["without memory", ""]))
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
