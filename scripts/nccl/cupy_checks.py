"""CuPy over the libnccl that is loaded: cupy.cuda.nccl in two processes and in one, and cupyx.distributed.

    LD_PRELOAD=$PWD/libnccl.so python3 scripts/nccl/cupy_checks.py
"""

import multiprocessing
import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import cupy
from cupy.cuda import nccl

import client

COUNTS = [1, 1000, 1_000_003]


def types():
    names = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
    return [(getattr(nccl, f"NCCL_{name.upper()}"), cupy.dtype(name)) for name in names]


def as_bytes(id):
    return id if isinstance(id, bytes) else bytes(byte & 255 for byte in id)


def values(count, rank, dtype):
    return (cupy.arange(count) % 5 + rank).astype(dtype)


def same(got, want, what):
    cupy.cuda.Device().synchronize()
    wrong = int((got != want).sum())
    assert not wrong, f"{what}: {wrong} of {got.size} wrong"


def collectives(comm, rank, n):
    """Every call of a communicator, every type."""
    stream = cupy.cuda.Stream(non_blocking=True)
    for number, dtype in types():
        for count in COUNTS:
            what = f"{dtype} x {count}"
            total = sum(values(count, r, dtype) for r in range(n))
            with stream:
                mine, got = values(count, rank, dtype), cupy.zeros(count, dtype)
                comm.allReduce(mine.data.ptr, got.data.ptr, count, number, nccl.NCCL_SUM, stream.ptr)
                stream.synchronize()
                same(got, total, f"allReduce sum {what}")
                comm.allReduce(mine.data.ptr, got.data.ptr, count, number, nccl.NCCL_MAX, stream.ptr)
                stream.synchronize()
                same(got, values(count, n - 1, dtype), f"allReduce max {what}")
                for root in range(n):
                    comm.reduce(mine.data.ptr, got.data.ptr, count, number, nccl.NCCL_SUM, root, stream.ptr)
                    stream.synchronize()
                    if rank == root:
                        same(got, total, f"reduce to {root} {what}")
                    comm.broadcast(mine.data.ptr, got.data.ptr, count, number, root, stream.ptr)
                    stream.synchronize()
                    same(got, values(count, root, dtype), f"broadcast from {root} {what}")
                    own = mine.copy()
                    comm.bcast(own.data.ptr, count, number, root, stream.ptr)
                    stream.synchronize()
                    same(own, values(count, root, dtype), f"bcast from {root} {what}")
                whole = cupy.zeros(n * count, dtype)
                comm.allGather(mine.data.ptr, whole.data.ptr, count, number, stream.ptr)
                stream.synchronize()
                same(whole, cupy.concatenate([values(count, r, dtype) for r in range(n)]), f"allGather {what}")
                comm.reduceScatter(whole.data.ptr, got.data.ptr, count, number, nccl.NCCL_SUM, stream.ptr)
                stream.synchronize()
                same(got, values(count, rank, dtype) * dtype.type(n), f"reduceScatter {what}")
                nccl.groupStart()
                comm.send(mine.data.ptr, count, number, (rank + 1) % n, stream.ptr)
                comm.recv(got.data.ptr, count, number, (rank - 1) % n, stream.ptr)
                nccl.groupEnd()
                stream.synchronize()
                same(got, values(count, (rank - 1) % n, dtype), f"send and recv {what}")
    comm.check_async_error()


def two_processes(checks):
    cupy.cuda.Device(checks.rank).use()
    rank, n, kept = checks.rank, checks.size, {}

    def library():
        assert client.say_which(f"cupy {cupy.__version__} rank {rank}"), f"loaded: {client.loaded()}"
        assert nccl.get_version() > 20000, nccl.get_version()

    def begin():
        id = client.share(checks, "id", lambda: as_bytes(nccl.get_unique_id()))
        try:
            kept["comm"] = nccl.NcclCommunicator(n, id, rank)
        except TypeError:
            # Before CuPy 14 an id is a tuple of signed characters.
            kept["comm"] = nccl.NcclCommunicator(n, tuple(byte - 256 if byte > 127 else byte for byte in id), rank)
        assert (kept["comm"].rank_id(), kept["comm"].size(), kept["comm"].device_id()) == (rank, n, rank)

    def split():
        if not hasattr(kept["comm"], "commSplit"):
            raise client.Skipped("this CuPy has no commSplit")
        part = kept["comm"].commSplit(0, n - rank)
        assert (part.rank_id(), part.size()) == (n - 1 - rank, n), (part.rank_id(), part.size())
        collectives(part, n - 1 - rank, n)
        part.destroy()

    checks.run("library", library)
    checks.run("begin", begin)
    checks.run("collectives", lambda: collectives(kept["comm"], rank, n))
    checks.run("split", split)
    checks.run("destroy", lambda: kept.pop("comm").destroy())


def distributed(checks):
    """cupyx.distributed: a store of CuPy's own, and arrays instead of pointers."""
    from cupyx.distributed import init_process_group

    cupy.cuda.Device(checks.rank).use()
    rank, n = checks.rank, checks.size
    # CuPy's store is a process of its own whose object holds a lock: it cannot be pickled, as `spawn` would.
    multiprocessing.set_start_method("fork", force=True)

    def arrays():
        comm = init_process_group(n, rank, host="127.0.0.1", port=checks.options.port)
        for dtype in ("float32", "complex64", "int32"):
            mine, got = (cupy.arange(1001) + rank).astype(dtype), cupy.zeros(1001, dtype)
            comm.all_reduce(mine, got)
            same(got, (n * cupy.arange(1001) + n * (n - 1) // 2).astype(dtype), f"all_reduce {dtype}")
            parts = cupy.zeros((n, 1001), dtype)
            comm.all_to_all(cupy.stack([mine + to for to in range(n)]).astype(dtype), parts)
            same(parts, cupy.stack([(cupy.arange(1001) + r + rank) for r in range(n)]).astype(dtype), f"all_to_all {dtype}")
            comm.gather(mine, parts, root=0)
            if rank == 0:
                same(parts, cupy.stack([(cupy.arange(1001) + r) for r in range(n)]).astype(dtype), f"gather {dtype}")
            comm.scatter(parts, got, root=0)
            same(got, mine, f"scatter {dtype}")
        comm.barrier()
        comm.stop()

    checks.run("cupyx_distributed", arrays)


def one_process(checks):
    n = cupy.cuda.runtime.getDeviceCount()

    def all_devices():
        comms = nccl.NcclCommunicator.initAll(n)
        for count in COUNTS:
            arrays = []
            for device in range(n):
                with cupy.cuda.Device(device):
                    arrays.append(values(count, device, "float32"))
                    cupy.cuda.Device().synchronize()
            for _ in range(3):
                nccl.groupStart()
                for device, comm in enumerate(comms):
                    with cupy.cuda.Device(device):
                        comm.allReduce(arrays[device].data.ptr, arrays[device].data.ptr, count, nccl.NCCL_FLOAT32, nccl.NCCL_MAX, 0)
                nccl.groupEnd()
            for device in range(n):
                with cupy.cuda.Device(device):
                    same(arrays[device], values(count, n - 1, "float32"), f"device {device}, {count}")
        for comm in comms:
            comm.destroy()

    checks.run("init_all", all_devices)


if __name__ == "__main__":
    options = client.arguments(__doc__, port={"type": int, "default": 13_499, "help": "of cupyx.distributed's store"})
    status = [client.ranks(two_processes, options), client.ranks(distributed, options), client.ranks(one_process, options, size=1)]
    sys.exit(max(status))
