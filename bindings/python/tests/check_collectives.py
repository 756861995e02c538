"""Collectives: values, types, shapes; also asynchronous, coalesced, of objects."""

import torch
import torch.distributed as dist

from checks import DEVICE, NUMBERS, SHAPES, check, device, equal, full

@check("test_allreduce_basics", "test_allreduce_basics_using_work_api", "test_all_reduce_sum", "test_all_reduce_product", "test_all_reduce_min", "test_all_reduce_max")
def all_reduce(rank, n):
    cases = [("SUM", n * (n + 1) // 2), ("PRODUCT", 6 if n == 3 else n), ("MIN", 1), ("MAX", n)]
    for dtype in NUMBERS:
        for shape in SHAPES:
            for name, want in cases:
                tensor = full(shape, rank + 1, getattr(torch, dtype))
                dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
                equal(tensor, want, f"{name} {dtype} {shape}")


@check("test_all_reduce_sum_complex", "test_all_reduce_complex_unsupported_ops")
def all_reduce_complex(rank, n):
    tensor = full(3, complex(rank, 1), torch.complex64)
    dist.all_reduce(tensor)
    equal(tensor, full(3, complex(n * (n - 1) // 2, n), torch.complex64))


@check("test_allreduce_bool (test_c10d_nccl.py)")
def all_reduce_bool(rank, n):
    any_, all_ = full(2, rank == 0, torch.bool), full(2, rank == 0, torch.bool)
    dist.all_reduce(any_)
    dist.all_reduce(all_, dist.ReduceOp.PRODUCT)
    equal(any_, True)
    equal(all_, False)


@check("test_allreduce_ops (AVG; test_c10d_nccl.py)")
def all_reduce_average(rank, n):
    tensor = full(5, float(rank))
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    equal(tensor, (n - 1) / 2)
    # As NCCL: floats times 1/n before the sum, which would overflow; integers divided behind it, towards zero.
    for dtype, large in ((torch.float16, 6e4), (torch.bfloat16, 3e38), (torch.float32, 3e38), (torch.float64, 1.7e308)):
        part = torch.tensor(large, dtype=dtype) * torch.tensor(1 / n, dtype=dtype)
        want = float(sum([part] * (n - 1), part))
        tensor = full(5, large, dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        equal(tensor, want, f"all_reduce {dtype}")
        output, input = full(3, 0, dtype), full(3 * n, large, dtype)
        dist.reduce_scatter_tensor(output, input, dist.ReduceOp.AVG) if hasattr(dist, "reduce_scatter_tensor") else output.fill_(want)
        equal(output, want, f"reduce_scatter_tensor {dtype}")
    tensor = full(3, complex(3e38, -3e38), torch.complex64)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    equal(torch.view_as_real(tensor).abs().isfinite(), True, "complex64")
    tensor = full(3, -7 if rank == 0 else 0, torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    equal(tensor, int(-7 / n), "int64")


@check("test_allreduce_ops (BAND, BOR, BXOR), test_all_reduce_sum of 16-bit integers and 8-bit floats")
def all_reduce_bits_and_small_types(rank, n):
    # On GPUs as on CPUs; gloo has neither, nccl no bits and no 16-bit integers.
    values = [0b1101, 0b0111, 0b0101]
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "int64"):
        for name, fold in (("BAND", lambda a, b: a & b), ("BOR", lambda a, b: a | b), ("BXOR", lambda a, b: a ^ b)):
            if not hasattr(torch, dtype):
                continue
            tensor = full((7, 3), values[rank % 3], getattr(torch, dtype))
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            want = values[0]
            for r in range(1, n):
                want = fold(want, values[r % 3])
            equal(tensor.to(torch.int64), want, f"{name} {dtype}")
    for name, want in (("BAND", False), ("BOR", True), ("BXOR", True)):
        tensor = full(3, rank == 0, torch.bool)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        equal(tensor, want, name)
    for dtype in ("int16", "uint16", "float8_e4m3fn", "float8_e5m2"):
        for name, want in (("SUM", n * (n + 1) // 2), ("MIN", 1), ("MAX", n)):
            if not hasattr(torch, dtype):
                continue
            tensor = full((5, 1001), rank + 1, torch.float32).to(getattr(torch, dtype))
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            equal(tensor.float(), float(want), f"{name} {dtype}")


@check("test_allreduce_ops (PREMUL_SUM; test_c10d_nccl.py), test_reduce_ops, test_reduce_scatter_ops")
def premultiplied_sums(rank, n):
    make = getattr(dist, "_make_nccl_premul_sum", None)
    if make is None or torch.__version__ < "2":
        return
    total = n * (n + 1) // 2
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        # A number, or a tensor of the device.
        for factor in (0.5, full(1, 0.5, dtype)):
            tensor = full((3, 5), rank + 1, dtype)
            dist.all_reduce(tensor, make(factor))
            equal(tensor, total / 2, f"all_reduce {dtype}")
            tensor = full(4, rank + 1, dtype)
            dist.reduce(tensor, n - 1, make(factor))
            equal(tensor, total / 2 if rank == n - 1 else rank + 1, f"reduce {dtype}")
            output, input = full(3, 0, dtype), full(3 * n, rank + 1, dtype)
            dist.reduce_scatter_tensor(output, input, make(factor))
            equal(output, total / 2, f"reduce_scatter_tensor {dtype}")
            equal(input, rank + 1, "the input of reduce_scatter_tensor")
            dist.reduce_scatter(output, [full(3, rank + 1, dtype) for _ in range(n)], make(factor))
            equal(output, total / 2, f"reduce_scatter {dtype}")


@check("test_all_reduce_coalesced_manager_nccl, test_all_gather_coalesced, test_reduce_scatter_coalesced (_coalescing_manager)")
def coalescing_manager(rank, n):
    manager = getattr(dist.distributed_c10d, "_coalescing_manager", None)
    if manager is None or not hasattr(dist.distributed_c10d, "_CoalescingManager"):
        return
    for with_device in (True, False):
        for async_ops in (True, False):
            how = {"async_ops": async_ops, **({"device": device()} if with_device else {})}
            sums = [full(size, float(rank + 1)) for size in (3, 1, 70_000)]
            with manager(**how) as manager_of_sums:
                for tensor in sums:
                    dist.all_reduce(tensor)
            if async_ops:
                manager_of_sums.wait()
            for tensor in sums:
                equal(tensor, float(n * (n + 1) // 2), f"all_reduce {how}")
            all_ = [full((n, size), -1.0) for size in (2, 300)]
            with manager(**how) as manager_of_parts:
                for output in all_:
                    dist.all_gather_into_tensor(output, full(output.shape[1], float(rank)))
            if async_ops:
                manager_of_parts.wait()
            for output in all_:
                equal(output[n - 1], float(n - 1), f"all_gather {how}")
    # What torch does not gather itself: one work for all calls. A work of its own there is for lists, which are copied
    # at the end.
    lists = [[full(3, -1.0) for _ in range(n)] for _ in range(2)]
    with manager(device=device(), async_ops=True) as several:
        for i, parts in enumerate(lists):
            dist.all_gather(parts, full(3, float(rank + 10 * i)), async_op=True)
        token = full(5, float(rank))
        dist.broadcast(token, n - 1, async_op=True)
    several.wait()
    for i, parts in enumerate(lists):
        for r, part in enumerate(parts):
            equal(part, float(r + 10 * i), "all_gather")
    equal(token, float(n - 1), "broadcast")
    # Calls outside are none of it.
    work = dist.all_reduce(token, async_op=True)
    work.wait()
    equal(token, float(n * (n - 1)))


@check("test_allreduce_stress", "test_all_reduce_async (work.wait, is_completed)")
def many_in_flight(rank, n):
    tensors = [full(1 + i * 7, float(i + rank)) for i in range(64)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, (tensor, work) in enumerate(zip(tensors, works)):
        assert work.wait() is not False
        equal(tensor, float(i * n + n * (n - 1) / 2), f"tensor {i}")
    # Behind torch's dispatcher a work of Python's says it of itself alone.
    if DEVICE == "cpu" and ":" not in dist.get_backend():
        assert all(work.is_completed() for work in works)


@check("test_allreduce_basics (get_future)", "test_allgather_work_wait_gpu, future (test_c10d_common.py)")
def futures(rank, n):
    tensor = full(4, float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    then = work.get_future().then(lambda future: future.value()[0] * 2)
    equal(then.wait(), float(n * (n + 1)))


@check("test_allreduce_coalesced_basics", "test_allreduce_coalesced_async", "test_all_reduce_coalesced_sum, max, min, product")
def all_reduce_coalesced(rank, n):
    tensors = [full(size, float(rank + 1)) for size in (3, 1, 70_000)]
    work = dist.all_reduce_coalesced(tensors, async_op=True)
    work.wait()
    for tensor in tensors:
        equal(tensor, float(n * (n + 1) // 2))


@check("test_broadcast_basics", "test_broadcast_stress", "test_broadcast", "test_broadcast_object_list")
def broadcast(rank, n):
    for root in range(n):
        for dtype in NUMBERS + ["bool", "int16", "complex64"]:
            for shape in SHAPES:
                tensor = full(shape, rank == root, getattr(torch, dtype))
                dist.broadcast(tensor, root)
                equal(tensor, True if dtype == "bool" else 1, f"from {root} {dtype} {shape}")
    objects = ["rank 0's", {"a": 1}] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, **({} if DEVICE == "cpu" else {"device": device()}))
    assert objects == ["rank 0's", {"a": 1}]


@check("test_reduce_basics", "test_reduce_sum", "test_reduce_product", "test_reduce_min", "test_reduce_max")
def reduce(rank, n):
    for root in range(n):
        for name, want in (("SUM", n * (n + 1) // 2), ("MIN", 1), ("MAX", n)):
            tensor = full((3, 5), float(rank + 1))
            dist.reduce(tensor, root, getattr(dist.ReduceOp, name))
            if rank == root:
                equal(tensor, float(want), f"{name} to {root}")


@check("test_allgather_basics", "test_all_gather", "test_all_gather_complex", "test_all_gather_object_default_pg")
def all_gather(rank, n):
    for dtype in NUMBERS + ["int16", "bool", "complex64"]:
        outputs = [full((2, 3), 0, getattr(torch, dtype)) for _ in range(n)]
        dist.all_gather(outputs, full((2, 3), rank % 2, getattr(torch, dtype)))
        for r, output in enumerate(outputs):
            equal(output, full((2, 3), r % 2, getattr(torch, dtype)), dtype)
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(n)]


@check("test_all_gather_v_cuda (lengths that differ)")
def all_gather_uneven(rank, n):
    outputs = [full(r + 1, -1.0) for r in range(n)]
    dist.all_gather(outputs, full(rank + 1, float(rank)))
    for r, output in enumerate(outputs):
        equal(output, float(r))


@check("test_allgather_coalesced_simple, with_empty")
def all_gather_coalesced(rank, n):
    outputs = [[full(3, -1.0), full((2, 2), -1.0)] for _ in range(n)]
    dist.all_gather_coalesced(outputs, [full(3, float(rank)), full((2, 2), float(rank + 10))])
    for r, (a, b) in enumerate(outputs):
        equal(a, float(r))
        equal(b, float(r + 10))


@check("test_all_gather_into_tensor_cat_cuda, stack_cuda", "test_allgather_base_basics")
def all_gather_into_tensor(rank, n):
    call = getattr(dist, "all_gather_into_tensor", None) or dist._all_gather_base
    output = full((n, 3), -1.0)
    call(output, full(3, float(rank)))
    equal(output, torch.arange(float(n), device=device()).repeat_interleave(3).view(n, 3))


@check("test_reduce_scatter_tensor_cuda", "test_reduce_scatter_base_basics")
def reduce_scatter_tensor(rank, n):
    call = getattr(dist, "reduce_scatter_tensor", None) or dist._reduce_scatter_base
    output = full(4, -1.0)
    call(output, torch.arange(4.0 * n, device=device()) + rank)
    equal(output, (torch.arange(4.0, device=device()) + 4 * rank) * n + n * (n - 1) / 2)


@check("test_reduce_scatter_sum_cuda", "test_reduce_scatter (ProcessGroupGlooTest)", "test_reduce_scatter_v_cuda")
def reduce_scatter(rank, n):
    output = full(3, -1.0)
    dist.reduce_scatter(output, [full(3, float(r + rank)) for r in range(n)])
    equal(output, float(rank * n + n * (n - 1) / 2))
    output = full(rank + 1, -1.0)
    dist.reduce_scatter(output, [full(r + 1, float(r)) for r in range(n)])
    equal(output, float(rank * n), "lengths that differ")


@check("test_all_to_all", "test_all_to_all_complex")
def all_to_all(rank, n):
    outputs = [full(r + 1, -1.0) for r in range(n)]
    dist.all_to_all(outputs, [full(rank + 1, float(10 * rank + r)) for r in range(n)])
    for r, output in enumerate(outputs):
        equal(output, float(10 * r + rank))


@check("test_all_to_all_single_equal_split", "test_all_to_all_single_unequal_split", "test_all_to_all_single_unequal_split_complex")
def all_to_all_single(rank, n):
    output = full((n, 2), -1.0)
    dist.all_to_all_single(output, torch.arange(2.0 * n, device=device()).view(n, 2) + 100 * rank)
    equal(output, torch.stack([torch.arange(2.0, device=device()) + 2 * rank + 100 * r for r in range(n)]))
    send, recv = [r + 1 for r in range(n)], [rank + 1] * n
    output = full((sum(recv), 3), -1.0)
    dist.all_to_all_single(output, full((sum(send), 3), float(rank)), recv, send)
    equal(output, torch.arange(float(n), device=device()).repeat_interleave(rank + 1).view(-1, 1).expand(-1, 3).contiguous())


@check("test_gather_basics", "test_gather", "test_gather_object")
def gather(rank, n):
    for root in range(n):
        outputs = [full((2, 2), -1.0) for _ in range(n)] if rank == root else None
        dist.gather(full((2, 2), float(rank)), outputs, root)
        for r, output in enumerate(outputs or []):
            equal(output, float(r))


@check("test_scatter_basics", "test_scatter", "test_scatter_object_list")
def scatter(rank, n):
    for root in range(n):
        output = full((2, 2), -1.0)
        dist.scatter(output, [full((2, 2), float(r)) for r in range(n)] if rank == root else None, root)
        equal(output, float(rank))


@check("test_sparse_allreduce_basics")
def sparse_all_reduce(rank, n):
    sparse = torch.eye(3).to(device()).to_sparse()
    dist.all_reduce(sparse)
    equal(sparse.to_dense(), torch.eye(3).to(device()) * n)


@check("test_sparse_allreduce_basics (several shapes)")
def sparse_shapes(rank, n):
    # Other places and numbers of elements on each rank; dense dimensions; nothing at all.
    for shape, dense in (((4, 3), 0), ((5, 2), 1), ((2, 2, 2), 1)):
        for count in (rank, 0, 3):
            torch.manual_seed(rank)
            indices = torch.stack([torch.randint(size, (count,)) for size in shape[: len(shape) - dense]])
            values = torch.ones(count, *shape[len(shape) - dense :])
            tensor = torch.sparse_coo_tensor(indices, values, shape).to(device())
            want = tensor.to_dense()
            dist.all_reduce(want)
            dist.all_reduce(tensor)
            equal(tensor.to_dense(), want, f"{shape} {count}")


@check("test_all_gather_object_default_pg, _subgroup", "test_gather_object", "test_scatter_object_list", "test_broadcast_object_list")
def objects(rank, n):
    mine = {"rank": rank, "list": list(range(rank)), "text": "x" * 1000 * rank}
    want = [{"rank": r, "list": list(range(r)), "text": "x" * 1000 * r} for r in range(n)]
    everyone = [None] * n
    dist.all_gather_object(everyone, mine)
    assert everyone == want
    for root in range(n):
        at_root = [None] * n if rank == root else None
        dist.gather_object(mine, at_root, root)
        assert at_root is None or at_root == want
        out = [None]
        dist.scatter_object_list(out, want if rank == root else [None] * n, root)
        assert out == [want[rank]], out
        sent = [mine] if rank == root else [None]
        dist.broadcast_object_list(sent, root)
        assert sent == [want[root]]
