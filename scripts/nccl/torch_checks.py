"""PyTorch's backend nccl over the libnccl that is loaded: every check on two GPUs or more, started by torchrun.

    LD_PRELOAD=$PWD/libnccl.so torchrun --nproc-per-node 2 scripts/nccl/torch_checks.py [--only NAMES] [--skip NAMES] [--lazy]

Values are small integers, so every result is exact. The checks of bindings/python/tests/check_*.py run, too: those that can
end over nccl. With --lazy the communicator is made by the first call instead of with the group, and nothing is split.
"""

import copy
import datetime
import os
import shutil
import sys
import tempfile
import threading
import warnings

os.environ["TEST_DEVICE"] = "cuda"
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path += [HERE, os.path.join(HERE, "../../bindings/python/tests")]

import torch
import torch.distributed as dist
from torch import nn

import checks as suite
import client
from client import Skipped

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
TYPES = ["int8", "uint8", "int32", "int64"] + FLOATS
COUNTS = [1, 7, 1000, 65_537, (1 << 20) + 3]
# Those which nccl does not have (docs/pytorch.md), or which are for another backend. torch 2.11 multiplies wrongly for
# premultiplied sums of bf16, gathers wrongly in its coalescing manager, and takes an all_gather with a tensor too many, over
# NVIDIA's library as well.
NOT_NCCL = suite.NOT_OURS | {"all_reduce_bits_and_small_types", "monitored_barrier", "premultiplied_sums", "coalescing_manager", "refused"}
# Layouts that PyTorch's backend does not look at, over any library.
NOT_NCCL |= {"conjugated_tensors", "negated_tensors", "other_layouts", "leaves_of_a_graph"}


def unless_refused(function):
    """A check that is skipped if torch's backend refuses a call of it: int16, lists of lists."""

    def run(*args):
        try:
            function(*args)
        except (TypeError, NotImplementedError) as error:
            raise client.Skipped(str(error)) from error

    return run


def device():
    return torch.device("cuda", torch.cuda.current_device())


def values(count, rank, dtype, modulus=4):
    """Integers that repeat, at most modulus - 1 + rank: 8-bit floats hold them and their sums over two ranks."""
    return cast(torch.arange(count, device=device(), dtype=torch.int64) % modulus + rank, dtype)


def cast(tensor, dtype):
    """By way of 32-bit floats for 8-bit types."""
    return (tensor.float() if 1 in (dtype.itemsize, tensor.dtype.itemsize) else tensor).to(dtype)


def same(got, want, what=""):
    got, want = cast(got, torch.float64).flatten(), cast(want, torch.float64).flatten()
    assert got.numel() == want.numel(), f"{what}: {got.numel()} elements, expected {want.numel()}"
    at = (got != want).nonzero().flatten()
    if at.numel():
        first = at[0].item()
        raise AssertionError(f"{what}: {at.numel()} of {got.numel()} wrong, element {first} is {got[first]}, expected {want[first]}")


def every_type_and_count(body):
    """body(dtype, count, what) for all."""

    def run(n):
        # Sums of more than two ranks are too large for 8-bit floats.
        for name in TYPES if n == 2 else TYPES[:-2]:
            for count in COUNTS:
                body(n, getattr(torch, name), count, f"{name} x {count}")

    return run


def all_reduce(n, dtype, count, what):
    rank = dist.get_rank()
    parts = [values(count, r, torch.float64) for r in range(n)]
    wants = {"SUM": sum(parts), "MIN": parts[0], "MAX": parts[-1]}
    if dtype.is_floating_point:
        wants["AVG"] = sum(parts) / n
    for name, want in wants.items():
        tensor = values(count, rank, dtype)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        same(tensor, want, f"{name} {what}")
    # 1 and 2: their products over a few ranks fit everywhere.
    tensor = cast(values(count, rank, torch.int64, 2) % 2 + 1, dtype)
    want = torch.ones(count, device=device(), dtype=torch.float64)
    for r in range(n):
        want *= values(count, r, torch.int64, 2) % 2 + 1
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    same(tensor, want, f"PRODUCT {what}")


def all_gather(n, dtype, count, what):
    rank = dist.get_rank()
    want = torch.cat([values(count, r, torch.float64) for r in range(n)])
    output = torch.zeros(n * count, device=device(), dtype=torch.float32).to(dtype)
    dist.all_gather_into_tensor(output, values(count, rank, dtype))
    same(output, want, what)
    # In place: the input is the output's own part.
    output = torch.zeros(n * count, device=device(), dtype=torch.float32).to(dtype)
    mine = output[rank * count : (rank + 1) * count]
    mine.copy_(values(count, rank, dtype))
    dist.all_gather_into_tensor(output, mine)
    same(output, want, f"in place {what}")


def reduce_scatter(n, dtype, count, what):
    rank = dist.get_rank()
    whole = [values(n * count, r, torch.float64) for r in range(n)]
    want = sum(whole)[rank * count : (rank + 1) * count]
    output = torch.zeros(count, device=device(), dtype=torch.float32).to(dtype)
    input = values(n * count, rank, dtype)
    dist.reduce_scatter_tensor(output, input)
    same(output, want, what)
    same(input, whole[rank], f"the input of {what}")
    mine = input[rank * count : (rank + 1) * count]
    dist.reduce_scatter_tensor(mine, input)
    same(mine, want, f"in place {what}")


def rooted(n, dtype, count, what):
    rank = dist.get_rank()
    total = sum(values(count, r, torch.float64) for r in range(n))
    for root in range(n):
        tensor = values(count, rank, dtype)
        dist.broadcast(tensor, root)
        same(tensor, values(count, root, torch.float64), f"broadcast from {root} {what}")
        tensor = values(count, rank, dtype)
        dist.reduce(tensor, root)
        if rank == root:
            same(tensor, total, f"reduce to {root} {what}")
        outputs = [cast(torch.zeros(count, device=device()), dtype) for _ in range(n)] if rank == root else None
        dist.gather(values(count, rank, dtype), outputs, root)
        for r, output in enumerate(outputs or []):
            same(output, values(count, r, torch.float64), f"gather to {root} {what}")
        output = cast(torch.zeros(count, device=device()), dtype)
        dist.scatter(output, [values(count, r, dtype) for r in range(n)] if rank == root else None, root)
        same(output, values(count, rank, torch.float64), f"scatter from {root} {what}")


def all_to_all(n, dtype, count, what):
    rank = dist.get_rank()
    output = torch.zeros(n * count, device=device()).to(dtype)
    dist.all_to_all_single(output, cast(torch.cat([values(count, rank + to, torch.int64) for to in range(n)]), dtype))
    same(output, torch.cat([values(count, r + rank, torch.float64) for r in range(n)]), what)
    # Lengths that differ, some of them 0.
    send, receive = [count * ((rank + to) % 2) for to in range(n)], [count * ((r + rank) % 2) for r in range(n)]
    output = torch.zeros(sum(receive), device=device()).to(dtype)
    dist.all_to_all_single(output, values(sum(send), rank, dtype), receive, send)
    parts = []
    for r in range(n):
        lengths = [count * ((r + to) % 2) for to in range(n)]
        begin = sum(lengths[:rank])
        parts.append(values(sum(lengths), r, torch.float64)[begin : begin + lengths[rank]])
    want = torch.cat(parts)
    same(output, want, f"uneven {what}")


def messages(n, dtype, count, what):
    rank = dist.get_rank()
    right, left = (rank + 1) % n, (rank - 1) % n
    got = cast(torch.zeros(count, device=device()), dtype)
    calls = [dist.P2POp(dist.isend, values(count, rank, dtype), right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    same(got, values(count, left, torch.float64), what)


def batches_of_messages(n):
    """Many in one batch: both directions, several sizes, and to itself."""
    rank = dist.get_rank()
    sizes = [1, 1000, 3_000_001]
    calls, found = [], []
    for peer in range(n):
        for size in sizes:
            got = torch.zeros(size, device=device())
            found.append((got, peer))
            calls.append(dist.P2POp(dist.isend, values(size, rank, torch.float32), peer))
            calls.append(dist.P2POp(dist.irecv, got, peer))
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    for got, peer in found:
        same(got, values(got.numel(), peer, torch.float32), f"from {peer}")


def misaligned(n):
    rank = dist.get_rank()
    for name in TYPES:
        for offset in (1, 3):
            tensor = values(offset + 100_003, rank, getattr(torch, name))[offset:]
            want = sum(values(offset + 100_003, r, torch.float64)[offset:] for r in range(n))
            dist.all_reduce(tensor)
            same(tensor, want, f"{name} from element {offset}")


def more_than_2_to_the_31(n):
    """Counts that do not fit into 32 bits."""
    rank, count = dist.get_rank(), (1 << 31) + 17
    if torch.cuda.mem_get_info()[0] < 4 * count:
        raise Skipped(f"{4 * count >> 30} GiB of a GPU are not free")
    tensor = torch.full((count,), rank + 1, dtype=torch.uint8, device=device())
    dist.all_reduce(tensor)
    for part in tensor.split(1 << 28):
        assert bool((part == n * (n + 1) // 2).all()), "all_reduce"
    tensor.fill_(rank + 1)
    dist.broadcast(tensor, n - 1)
    for part in tensor.split(1 << 28):
        assert bool((part == n).all()), "broadcast"
    del tensor, part
    torch.cuda.empty_cache()


def captured(body, warm_up=2):
    """A graph of body(), which has run outside before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph


def graphs(n):
    """One graph with every kind of call; its inputs change between replays."""
    rank, count = dist.get_rank(), 100_003
    sums, input, scattered = (torch.zeros(size, device=device()) for size in (count, n * count, count))
    gathered, exchanged, got, token = (torch.zeros(size, device=device()) for size in (n * count, n * count, count, count))

    def body():
        dist.all_reduce(sums)
        dist.reduce_scatter_tensor(scattered, input)
        dist.all_gather_into_tensor(gathered, scattered)
        dist.all_to_all_single(exchanged, input)
        messages = [dist.P2POp(dist.isend, sums, (rank + 1) % n), dist.P2POp(dist.irecv, got, (rank - 1) % n)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        dist.broadcast(token, 0)

    graph = captured(body)
    for step in range(30):
        sums.fill_(rank + step)
        input.copy_(torch.arange(n, device=device()).repeat_interleave(count) + rank + step)
        token.fill_(step if rank == 0 else -1)
        graph.replay()
        total = n * (n - 1) // 2 + n * step
        same(sums, torch.full_like(sums, total), f"sums {step}")
        parts = torch.arange(n, device=device()) * n + total
        same(scattered, torch.full_like(scattered, parts[rank]), f"scattered {step}")
        same(gathered, parts.repeat_interleave(count), f"gathered {step}")
        same(exchanged, (torch.arange(n, device=device()) + rank + step).repeat_interleave(count), f"exchanged {step}")
        same(got, torch.full_like(got, total), f"got {step}")
        same(token, torch.full_like(token, step), f"token {step}")


def graphs_of_streams(n):
    """Calls of two groups on two streams within one graph, and two graphs replayed in turn."""
    rank = dist.get_rank()
    other = dist.new_group()
    first, second = torch.zeros(1000, device=device()), torch.zeros(70_001, device=device())
    side = torch.cuda.Stream()

    def body():
        side.wait_stream(torch.cuda.current_stream())
        dist.all_reduce(first)
        with torch.cuda.stream(side):
            dist.all_reduce(second, group=other)
        torch.cuda.current_stream().wait_stream(side)
        first.mul_(2)

    one, two = captured(body), captured(lambda: dist.all_reduce(first))
    for step in range(20):
        first.fill_(rank + step)
        second.fill_(step)
        one.replay()
        two.replay()
        same(first, torch.full_like(first, 2 * n * (n * (n - 1) // 2 + n * step)), f"first {step}")
        same(second, torch.full_like(second, n * step), f"second {step}")
    torch.cuda.synchronize()
    del one, two
    dist.destroy_process_group(other)


def sums_of(group, ranks, what=""):
    """An all_reduce over a group that holds these ranks."""
    tensor = torch.full((4097,), float(dist.get_rank()), device=device())
    dist.all_reduce(tensor, group=group)
    same(tensor, torch.full_like(tensor, sum(ranks)), what)


def non_blocking(n):
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    group = dist.new_group(pg_options=options)
    for turn in range(3):
        sums_of(group, range(n), f"turn {turn}")
    dist.barrier(group)
    dist.destroy_process_group(group)


def split_groups(n, lazy):
    if lazy:
        raise Skipped("torch splits groups that were made with device_id")
    # All, in reverse order of colours; one by one.
    group = dist.split_group(split_ranks=[list(range(n))])
    sums_of(group, range(n), "all")
    alone = dist.split_group(split_ranks=[[r] for r in range(n)])
    sums_of(alone, [dist.get_rank()], "alone")
    for one in (group, alone):
        dist.destroy_process_group(one)


def shrunk_group(n, lazy):
    if lazy or not hasattr(dist, "shrink_group"):
        raise Skipped("this torch has no shrink_group, or the group has no communicator yet")
    group = dist.new_group()
    sums_of(group, range(n), "before")
    if dist.get_rank() != n - 1:
        small = dist.shrink_group([n - 1], group=group)
        sums_of(small, range(n - 1), "after")
        dist.destroy_process_group(small)
    dist.barrier()
    if dist.get_rank() == n - 1:
        group._get_backend(device()).abort()


def many_groups(n):
    """Twenty communicators at once, as frameworks make them, and what they take of the GPU."""
    rank = dist.get_rank()
    torch.cuda.synchronize()
    free = [torch.cuda.mem_get_info()[0]]
    groups = []
    for _ in range(20):
        groups.append(dist.new_group())
        sums_of(groups[-1], range(n))
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    if rank == 0:
        took = [(a - b) / (1 << 20) for a, b in zip(free, free[1:])]
        print(f"note many_groups: GPU memory by group, MiB: {', '.join(f'{t:.0f}' for t in took)}", flush=True)
    for turn in range(3):
        for group in groups:
            sums_of(group, range(n), f"turn {turn}")
    for group in groups:
        dist.destroy_process_group(group)


def registered_memory(n, lazy):
    """Memory of ncclMemAlloc, registered, and as a symmetric window."""
    if lazy:
        raise Skipped("registration needs a communicator that is there")
    backend = dist.group.WORLD._get_backend(device())
    for symmetric in (False, True):
        with_pool(n, backend, symmetric)


def with_pool(n, backend, symmetric):
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.zeros(3_000_001, device=device())
        parts = torch.zeros(n * 1_000_000, device=device())
    try:
        backend.register_mem_pool(pool, **({"symm": True} if symmetric else {}))
    except TypeError:
        raise Skipped("this torch registers no symmetric windows") from None
    for turn in range(3):
        tensor.copy_(values(tensor.numel(), dist.get_rank() + turn, torch.float32))
        dist.all_reduce(tensor)
        same(tensor, sum(values(tensor.numel(), r + turn, torch.float32) for r in range(n)), f"symmetric: {symmetric}")
        dist.all_gather_into_tensor(parts, tensor[:1_000_000])
    graph = captured(lambda: dist.all_reduce(tensor))
    tensor.fill_(1)
    graph.replay()
    same(tensor, torch.full_like(tensor, n), f"in a graph, symmetric: {symmetric}")
    torch.cuda.synchronize()
    # A graph that is alive keeps its calls' registrations.
    del graph
    backend.deregister_mem_pool(pool)


def time_estimate(n):
    """ncclGroupSimulateEnd: nothing runs."""
    from torch.distributed.distributed_c10d import _time_estimator

    tensor = torch.full((1 << 20,), 1.0, device=device())
    with _time_estimator(device=device()) as estimate:
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    same(tensor, torch.ones_like(tensor), "it ran")
    if dist.get_rank() == 0:
        print(f"note time_estimate: {estimate.estimated_time} us for 4 MiB", flush=True)


def abort(n):
    """A group whose last rank never comes is aborted from another thread while its kernel waits; others work on."""
    group = dist.new_group()
    # All make a call of this length first: the first larger call of a group waits for the others before its kernel
    # (docs/nccl.md, "Limits").
    dist.all_reduce(torch.ones(1 << 20, device=device()), group=group)
    sums_of(group, range(n))
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() != n - 1:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            dist.all_reduce(torch.ones(1 << 20, device=device()), group=group, async_op=True)
        backend = group._get_backend(device())
        thread = threading.Thread(target=backend.abort)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "abort did not return within 60 s"
        stream.synchronize()
    sums_of(None, range(n), "the default group after it")
    if dist.get_rank() == n - 1:
        group._get_backend(device()).abort()


def tensor_parallel(n):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(64, 128 * n), nn.ReLU(), nn.Linear(128 * n, 64)).to(device())
    split = parallelize_module(copy.deepcopy(whole), init_device_mesh("cuda", (n,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (whole, split)]
    for step in range(5):
        inputs = torch.arange(64.0 * 8, device=device()).view(8, 64) / 512 + step
        losses = []
        for model, optimizer in zip((whole, split), optimizers):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) <= 1e-4 * abs(losses[0]), (step, losses)


def tensors_of_a_mesh(n):
    """DTensor: every redistribution is a collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (1, n), mesh_dim_names=("one", "all"))
    line = mesh["all"]
    whole = values(64 * n * 32 * n, 0, torch.float32, 1000).view(64 * n, 32 * n)
    rows = distribute_tensor(whole, line, [Shard(0)])
    same(rows.redistribute(line, [Replicate()]).to_local(), whole, "gathered")
    columns = rows.redistribute(line, [Shard(1)])
    same(columns.full_tensor(), whole, "exchanged")
    part = DTensor.from_local(whole, line, [Partial()])
    same(part.redistribute(line, [Replicate()]).to_local(), whole * n, "summed")
    same(part.redistribute(line, [Shard(0)]).full_tensor(), whole * n, "summed and scattered")
    sums_of(mesh.get_group("one"), [dist.get_rank()], "a dimension of one")
    sums_of(mesh.get_group("all"), range(n), "a dimension of all")


def fully_sharded_2(n):
    """FSDP2 against one process with the whole batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    whole = nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(4)], nn.Linear(96, 1)).to(device())
    sharded, mesh = copy.deepcopy(whole), init_device_mesh("cuda", (n,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, sharded)]
    for step in range(5):
        batches = [torch.arange(96.0 * 4, device=device()).view(4, 96) / 384 + r + step for r in range(n)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        want = sum(whole(batch).square().mean() for batch in batches) / n
        want.backward()
        loss = sharded(batches[dist.get_rank()]).square().mean()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert abs(mean.item() - want.item()) <= 1e-4 * abs(want.item()) + 1e-6, (step, mean.item(), want.item())
        for optimizer in optimizers:
            optimizer.step()


def pipeline(n):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = [nn.Linear(32, 32).to(device()) for _ in range(n)]
    batch = torch.arange(32.0 * 8, device=device()).view(8, 32) / 256
    want = batch
    for layer in layers:
        want = layer(want)
    stage = PipelineStage(layers[rank], rank, n, device())
    schedule = ScheduleGPipe(stage, n_microbatches=4)
    got = schedule.step(*([batch] if rank == 0 else []))
    if rank == n - 1:
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), (got - want).abs().max()


def data_parallel_bits(n):
    """Gradients over this library are those that one rank computes, bit for bit, when all ranks see the same batch."""
    from torch.nn.parallel import DistributedDataParallel

    if n & (n - 1):
        raise Skipped("a mean of equal numbers is exact over a power of two alone")
    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).to(device())
    replica = DistributedDataParallel(copy.deepcopy(alone), device_ids=[torch.cuda.current_device()], bucket_cap_mb=0.25)
    inputs = torch.randn(32, 256, device=device())
    for model in (alone, replica):
        model(inputs).square().mean().backward()
    for (name, got), want in zip(replica.module.named_parameters(), alone.parameters()):
        assert torch.equal(got.grad, want.grad), name


def symmetric_memory(n):
    """torch's symmetric memory over nccl needs the device API: works, or is refused by an exception that says why."""
    import torch.distributed._symmetric_memory as memory

    sums_of(None, range(n))
    try:
        memory.set_backend("NCCL")
        tensor = memory.empty(1024, dtype=torch.float32, device=device())
        memory.rendezvous(tensor, group=dist.group.WORLD.group_name)
        said = "it works"
    except RuntimeError as error:
        said = " ".join(str(error).split())[:200]
    if dist.get_rank() == 0:
        print(f"note symmetric_memory: {said}", flush=True)
    sums_of(None, range(n), "after it")


def main():
    options = client.arguments(__doc__, lazy={"action": "store_true", "help": "no communicator before the first call"})
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    # All ranks are children of one torchrun.
    folder = os.path.join(tempfile.gettempdir(), f"torch-checks-{os.environ['MASTER_PORT']}-{os.getppid()}")
    os.makedirs(folder, exist_ok=True)
    warnings.filterwarnings("ignore")
    torch.cuda.set_device(local)
    torch.backends.cuda.matmul.allow_tf32 = False
    checks = client.Checks(rank, size, folder, options)

    def begin():
        more = {} if options.lazy else {"device_id": torch.device("cuda", local)}
        dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=options.limit), **more)
        sums_of(None, range(size))

    def library():
        assert client.say_which(f"torch {torch.__version__} rank {rank}", linked=True), f"loaded: {client.loaded()}"

    only, options.only = options.only, ""
    checks.run("begin", begin)
    checks.run("library", library)
    options.only = only
    for function in (batches_of_messages, misaligned, more_than_2_to_the_31, graphs, graphs_of_streams, non_blocking):
        checks.run(function.__name__, function, size)
    for function in (split_groups, registered_memory):
        checks.run(function.__name__, function, size, options.lazy)
    for function in (many_groups, time_estimate, data_parallel_bits, fully_sharded_2, tensor_parallel, tensors_of_a_mesh, pipeline):
        checks.run(function.__name__, function, size)
    suite.load()
    for name, function, _, sizes in suite.CHECKS:
        # Unbatched messages of a group that has a communicator from the start are one sequence: rank 0 would wait in its
        # receive for the send behind it, over NVIDIA's library as well.
        waits = name == "receives_first" and not options.lazy
        if name not in NOT_NCCL and size in sizes and not waits:
            checks.run(f"suite_{name}", unless_refused(function), rank, size)
    # Late, because kernels of every type and operator are compiled for these.
    for body in (all_reduce, all_gather, reduce_scatter, rooted, all_to_all, messages):
        checks.run(f"{body.__name__}_types", every_type_and_count(body), size)
    # Last, because a library that fails here may leave the process unusable: NVIDIA's 2.28.9 hung in this one.
    checks.run("shrunk_group", shrunk_group, size, options.lazy)
    checks.run("abort", abort, size)
    checks.run("symmetric_memory", symmetric_memory, size)
    checks.run("end", dist.destroy_process_group)
    status = checks.end()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
