"""Checks of the backend, and how one rank runs them.

Each names the upstream tests whose calls it makes (test/distributed/test_c10d_gloo.py, test_c10d_common.py, test_c10d_nccl.py,
torch/testing/_internal/distributed/distributed_test.py); the code is ours. The files check_*.py hold them, by idea.
"""

import datetime
import importlib
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist

# Where the checks are.
MODULES = ["check_collectives", "check_layouts", "check_messages", "check_groups", "check_data_parallel", "check_refused"]
CHECKS = []
# Chosen by TEST_DEVICE: cuda needs a GPU per rank.
DEVICE = os.environ.get("TEST_DEVICE", "cpu")


def check(*upstream, sizes=(2, 3)):
    """A function of (rank, size) that runs on every rank of a group, and the tests upstream which make the same calls."""

    def add(function):
        CHECKS.append((function.__name__, function, upstream, sizes))
        return function

    return add


def load():
    for module in MODULES:
        importlib.import_module(module)


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


def tcp_store(path, rank, size):
    """torch's usual store. Rank 0 chooses its port, and says it in a file."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
        with open(f"{path}.new", "w") as file:
            file.write(str(store.port))
        os.rename(f"{path}.new", path)
        return store
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path) as file:
        return dist.TCPStore("127.0.0.1", int(file.read()), size, False, wait_for_workers=False)


def run_check_over_tcp(place, name, backend, store):
    return run_check(place, name, backend, store, over_tcp=True)


def run_check(place, name, backend, store, timeout=60, over_tcp=False):
    """One rank of one check, or of "all" that tinynccl does."""
    load()
    rank, size = place
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    if "tinynccl" in backend:
        import tinynccl.torch  # noqa: F401
    where = {"store": tcp_store(store, rank, size)} if over_tcp else {"init_method": f"file://{store}"}
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout), **where)
    outcomes = {}
    left_out = NOT_OURS | (NOT_OF_A_PART if "," in backend else set())
    for one, function, _, sizes in CHECKS:
        if (name == one or name == "all" and one not in left_out) and size in sizes:
            if os.environ.get("TEST_VERBOSE"):
                print(f"{time.strftime('%X')} rank {rank}: {one}", file=sys.stderr, flush=True)
            try:
                function(rank, size)
                outcomes[one] = "passed"
            except Exception as error:
                outcomes[one] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                if name != "all":
                    raise
    dist.destroy_process_group()
    return outcomes


# Not supported in a group with several backends: torch asks its own half of a work for the sender.
NOT_OF_A_PART = {"recv_any_source", "any_source_and_named"}
# What tinynccl does not do, and says so; docs/pytorch.md has the reasons.
NOT_OURS = set()
if DEVICE == "cuda":
    NOT_OURS = NOT_OF_A_PART | {"tags_out_of_order", "sparse_all_reduce", "sparse_shapes", "sparse_gradients"}


def run_any_source_in_a_part(place, backend, store):
    rank, size = place
    import tinynccl.torch  # noqa: F401

    dist.init_process_group(backend, rank=rank, world_size=size, init_method=f"file://{store}", timeout=datetime.timedelta(seconds=60))
    for turn in range(2):
        if rank == 1:
            dist.send(full(3, 1.0 + turn), 0)
            continue
        got, said = full(3, 0.0), None
        try:
            dist.recv(got) if turn else dist.irecv(got).wait()
        except RuntimeError as error:
            said = str(error)
        assert bool(turn) == ("sourceRank" in (said or "")), said
        equal(got, 1.0 + turn)
    dist.destroy_process_group()


def run_check_briefly(place, name, backend, store):
    return run_check(place, name, backend, store, 3)


def run_exact_sums(place, backend, store):
    """From left to right, rounded every time, the sums of three ranks are 0, 256 and 2048; the averages are 0 in f32."""
    rank, size = place
    import tinynccl.torch  # noqa: F401

    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=size, init_method=f"file://{store}", timeout=datetime.timedelta(seconds=60))
    for dtype, terms in ((torch.float32, (1e8, 1.0, -1e8)), (torch.bfloat16, (256.0, 1.0, 1.0)), (torch.float16, (2048.0, 1.0, 1.0))):
        tensor, output = full(1001, terms[rank], dtype), full(7, 0.0, dtype)
        dist.all_reduce(tensor)
        equal(tensor, sum(terms[:size]), f"all_reduce {dtype}")
        dist.reduce_scatter_tensor(output, full(7 * size, terms[rank], dtype))
        equal(output, sum(terms[:size]), f"reduce_scatter {dtype}")
    least = 2.0**-149
    tensor = full(1001, least)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    equal(tensor, least, "average")
    dist.destroy_process_group()
