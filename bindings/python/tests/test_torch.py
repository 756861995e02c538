"""The backend "tinynccl" of torch.distributed: the calls that PyTorch's own c10d tests make, and what they expect.

Each check names the upstream test whose calls it makes (test/distributed/test_c10d_gloo.py, test_c10d_common.py,
torch/testing/_internal/distributed/distributed_test.py, test_c10d_nccl.py). ``python test_torch.py --table`` prints how they end,
over tinynccl and over gloo.
"""

import datetime
import os
import sys
import tempfile
import unittest
import warnings

from harness import ranks

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = None

CHECKS = []
# Chosen by TEST_DEVICE: cuda needs a GPU per rank.
DEVICE = os.environ.get("TEST_DEVICE", "cpu")


def check(*upstream, sizes=(2, 3)):
    """A function of (rank, size) that runs on every rank of a group, and the tests upstream which make the same calls."""

    def add(function):
        CHECKS.append((function.__name__, function, upstream, sizes))
        return function

    return add


def device():
    return torch.device("cpu") if DEVICE == "cpu" else torch.device("cuda", torch.cuda.current_device())


def full(shape, value, dtype=None):
    return torch.full(shape if isinstance(shape, (tuple, list)) else (shape,), value, dtype=dtype or torch.float32, device=device())


def equal(got, want, what=""):
    if not isinstance(want, torch.Tensor):
        want = torch.full_like(got, want)
    assert got.dtype == want.dtype and torch.equal(got, want), f"{what}: {got} is not {want}"


NUMBERS = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"]
SHAPES = [(1,), (0,), (3,), (7, 3), (5, 1, 1001)]


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


@check("test_allreduce_stress", "test_all_reduce_async (work.wait, is_completed)")
def many_in_flight(rank, n):
    tensors = [full(1 + i * 7, float(i + rank)) for i in range(64)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, (tensor, work) in enumerate(zip(tensors, works)):
        assert work.wait() is not False
        equal(tensor, float(i * n + n * (n - 1) / 2), f"tensor {i}")
    if DEVICE == "cpu":
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


@check("test_send_recv_with_tag (out of order)", sizes=(2,))
def tags_out_of_order(rank, n):
    if rank == 0:
        works = [dist.isend(full(1, float(tag)), 1, tag=tag) for tag in (1, 2)]
    else:
        found = {tag: full(1, 0.0) for tag in (2, 1)}
        works = [dist.irecv(tensor, 0, tag=tag) for tag, tensor in found.items()]
    for work in works:
        work.wait()
    if rank == 1:
        equal(found[1], 1.0)
        equal(found[2], 2.0)


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


@check("test_DistributedDataParallel, _with_buckets", "test_ddp_comm_hook_allreduce_hook", "test_gloo_backend_cpu_module", "test_grad_div", "test_find_unused_parameters")
def data_parallel(rank, n):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)]).to(device())
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0005}):
        replica = torch.nn.parallel.DistributedDataParallel(model, **options)
        replica.zero_grad()
        with replica.no_sync():
            replica(full((2, 16), 1.0)).sum().backward()
        replica.zero_grad()
        inputs = torch.arange(16.0, device=device()).view(1, 16) / 16 + rank
        replica(inputs).sum().backward()
        mean = [p.grad.clone() for p in model.parameters()]
        local = type(model)(*[torch.nn.Linear(16, 16) for _ in range(4)]).to(device())
        local.load_state_dict(model.state_dict())
        for r in range(n):
            (local(torch.arange(16.0, device=device()).view(1, 16) / 16 + r).sum() / n).backward()
        for got, want in zip(mean, local.parameters()):
            assert torch.allclose(got, want.grad, rtol=1e-4, atol=1e-5), options
    hooked = torch.nn.parallel.DistributedDataParallel(model)

    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / n)

    hooked.register_comm_hook(None, hook)
    hooked.zero_grad()
    hooked(full((2, 16), float(rank))).sum().backward()


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
        (lambda: dist.all_reduce(full(2, 0, torch.int16)), ["cannot be reduced", ""]),
    ]
    if dist.get_backend() == "tinynccl":
        cases.append((lambda: dist.all_reduce(sparse), ["sparse", ""]))
        cases.append((lambda: dist.all_reduce(torch.zeros(2, device="meta")), ["meta", ""]))
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


@check("test_sparse_allreduce_basics")
def sparse_all_reduce(rank, n):
    sparse = torch.eye(3).to(device()).to_sparse()
    dist.all_reduce(sparse)
    equal(sparse.to_dense(), torch.eye(3).to(device()) * n)


def run_check(place, name, backend, store, timeout=60):
    """One rank of one check."""
    rank, size = place
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    if backend == "tinynccl":
        import tinynccl.torch  # noqa: F401
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout)
    )
    outcomes = {}
    for one, function, _, sizes in CHECKS:
        if (name == one or name == "all" and one not in NOT_OURS) and size in sizes:
            try:
                function(rank, size)
                outcomes[one] = "passed"
            except Exception as error:
                outcomes[one] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                if name != "all":
                    raise
    dist.destroy_process_group()
    return outcomes


# What tinynccl does not do, and says so; docs/pytorch.md has the reasons.
NOT_OURS = {"recv_any_source", "tags_out_of_order", "sparse_all_reduce"}


def run_check_briefly(place, name, backend, store):
    return run_check(place, name, backend, store, 3)


def one_dies(place, store):
    rank, size = place
    import tinynccl.torch  # noqa: F401

    dist.init_process_group("tinynccl", init_method=f"file://{store}", rank=rank, world_size=size)
    dist.barrier()
    if rank == 1:
        os._exit(5)
    dist.all_reduce(torch.ones(3))


def shapes_differ(place, store, size_of):
    rank, size = place
    import tinynccl.torch  # noqa: F401

    dist.init_process_group("tinynccl", init_method=f"file://{store}", rank=rank, world_size=size)
    dist.all_reduce(torch.ones(size_of + rank), async_op=True).wait()


def late(place, store):
    rank, size = place
    import tinynccl.torch  # noqa: F401

    second = datetime.timedelta(seconds=1)
    dist.init_process_group("tinynccl", init_method=f"file://{store}", rank=rank, world_size=size, timeout=second)
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        import time

        time.sleep(3)


def destroyed_in_use(place, store):
    """The group is destroyed while calls are in flight: what is waited for ends, with a result or an exception."""
    rank, size = place
    import tinynccl.torch  # noqa: F401

    dist.init_process_group("tinynccl", init_method=f"file://{store}", rank=rank, world_size=size)
    works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(4)]
    dist.destroy_process_group()
    for work in works:
        work.wait()


@unittest.skipIf(torch is None, "no torch here")
class Torch(unittest.TestCase):
    def launch(self, size, target, *args):
        with tempfile.TemporaryDirectory() as folder:
            return ranks(size, target, *args, os.path.join(folder, "store"), join=False)

    def returned(self, outcomes):
        for rank, outcome in enumerate(outcomes):
            self.assertEqual((outcome.kind, outcome.exitcode), ("returned", 0), f"rank {rank}: {outcome}")
            for name, result in (outcome.value or {}).items():
                self.assertEqual(result, "passed", f"{name} on rank {rank}")

    def test_together(self):
        for size in (2, 3) if DEVICE == "cpu" else (2,):
            outcomes = self.launch(size, run_check, "all", "tinynccl")
            self.returned(outcomes)
            self.assertGreater(len(outcomes[0].value), 20)

    def test_what_is_not_there_is_said(self):
        outcomes = self.launch(2, run_check_briefly, "recv_any_source", "tinynccl")
        self.assertRegex(outcomes[0].value, "Error: recv: rank 0: a receive from any rank is not supported", outcomes)
        outcomes = self.launch(2, run_check, "sparse_all_reduce", "tinynccl")
        self.assertRegex(outcomes[0].value, r"InvalidArgument: all_reduce: rank 0: tensor 0 is of layout torch.sparse_coo", outcomes)


@unittest.skipIf(torch is None or DEVICE != "cpu", "on the CPU")
class Failures(unittest.TestCase):
    launch = Torch.launch

    def launch2(self, target, *args):
        with tempfile.TemporaryDirectory() as folder:
            return ranks(2, target, os.path.join(folder, "store"), *args, join=False)

    def test_one_dies(self):
        outcomes = self.launch2(one_dies)
        self.assertRegex(outcomes[0].value, "PeerLost: .*rank 0 lost rank 1")
        self.assertEqual([outcome.exitcode for outcome in outcomes], [0, 5])

    def test_shapes_differ(self):
        for size in (3, 100_000):
            outcomes = self.launch2(shapes_differ, size)
            texts = [outcome.value for outcome in outcomes]
            self.assertTrue(any(text.startswith("Mismatch") for text in texts), texts)
            for text in texts:
                self.assertRegex(text, f"{size}.*{size + 1}|{size + 1}.*{size}")

    def test_late(self):
        outcomes = self.launch2(late)
        self.assertRegex(outcomes[0].value, r"Timeout: all_reduce.*not arrived: rank 1")

    def test_destroyed_in_use(self):
        for outcome in self.launch2(destroyed_in_use):
            self.assertTrue(outcome.kind == "returned" or "tinynccl" in outcome.value or "abort" in outcome.value, outcome)
            self.assertEqual(outcome.exitcode, 0)


def table():
    """How every check ends over both backends; what tinynccl does not do in processes of its own."""
    backends = ["tinynccl", "gloo"] if DEVICE == "cpu" else ["tinynccl", "nccl"]
    cells = {}
    for backend in backends:
        for name in ["all", *sorted(NOT_OURS)]:
            with tempfile.TemporaryDirectory() as folder:
                outcomes = ranks(2, run_check, name, backend, os.path.join(folder, "store"), 10, join=False)
            for outcome in outcomes:
                if outcome.kind == "returned":
                    for one, result in outcome.value.items():
                        if cells.get((one, backend), "passed") == "passed":
                            cells[one, backend] = result
                elif (name, backend) not in cells:
                    why = outcome.value if outcome.kind == "raised" else outcome.kind
                    cells[name, backend] = str(why).strip().splitlines()[-1]
    print(f"torch {torch.__version__}, {DEVICE}, 2 ranks\n")
    print("| Calls | Upstream's tests that make them | " + " | ".join(backends) + " |")
    print("|---|---|" + "---|" * len(backends))
    for name, _, upstream, _ in CHECKS:
        ends = [cells.get((name, backend), "not run")[:110].replace("|", "/") for backend in backends]
        print(f"| {name} | {', '.join(upstream)} | " + " | ".join(ends) + " |", flush=True)


if __name__ == "__main__":
    if "--table" in sys.argv:
        table()
    else:
        unittest.main(verbosity=2)
