"""The 19 functions that inference servers take from libnccl by ctypes (vLLM's wrapper; SGLang's adds two), called as they do.

    python3 scripts/nccl/vllm_like.py [--library PATH]

The library is opened by PATH, as $VLLM_NCCL_SO_PATH names it there, or found as libnccl.so.2 (LD_PRELOAD, LD_LIBRARY_PATH).
Memory and streams come from libcuda alone, so no other library can bring a libnccl of its own. Two processes, a GPU each.
"""

import ctypes
import os
import struct
import sys
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import client


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t up to commName (2.27): a library reads only `size` bytes of it."""

    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int), ("cga", c_int), ("min_ctas", c_int)]
    _fields_ += [("max_ctas", c_int), ("net_name", c_char_p), ("split_share", c_int), ("traffic_class", c_int), ("comm_name", c_char_p)]


UNDEFINED = -(1 << 31)
STATUS, COMM, STREAM, COUNT = c_int, c_void_p, c_void_p, c_size_t
# Arguments of each; those without a status are marked by their own result.
FUNCTIONS = {
    "ncclGetErrorString": [c_int],
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(UniqueId)],
    "ncclCommInitRank": [POINTER(COMM), c_int, UniqueId, c_int],
    "ncclCommInitRankConfig": [POINTER(COMM), c_int, UniqueId, c_int, POINTER(Config)],
    "ncclAllReduce": [c_void_p, c_void_p, COUNT, c_int, c_int, COMM, STREAM],
    "ncclReduce": [c_void_p, c_void_p, COUNT, c_int, c_int, c_int, COMM, STREAM],
    "ncclAllGather": [c_void_p, c_void_p, COUNT, c_int, COMM, STREAM],
    "ncclReduceScatter": [c_void_p, c_void_p, COUNT, c_int, c_int, COMM, STREAM],
    "ncclSend": [c_void_p, COUNT, c_int, c_int, COMM, STREAM],
    "ncclRecv": [c_void_p, COUNT, c_int, c_int, COMM, STREAM],
    "ncclBroadcast": [c_void_p, c_void_p, COUNT, c_int, c_int, COMM, STREAM],
    "ncclCommDestroy": [COMM],
    "ncclCommAbort": [COMM],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclCommWindowRegister": [COMM, c_void_p, c_size_t, POINTER(c_void_p), c_int],
    "ncclCommWindowDeregister": [COMM, c_void_p],
    # vLLM's wrapper goes on without this one: 2.28.9 does not export it.
    "ncclCommQueryProperties": [COMM, c_void_p],
    # SGLang's allocator.
    "ncclMemAlloc": [POINTER(c_void_p), c_size_t],
    "ncclMemFree": [c_void_p],
}
OPTIONAL = {"ncclCommQueryProperties"}
FLOAT, INT64, SUM, MAX = 7, 4, 0, 2


class Nccl:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.missing = []
        for name, arguments in FUNCTIONS.items():
            function = getattr(self.library, name, None)
            if function is None:
                self.missing.append(name)
                continue
            function.argtypes, function.restype = arguments, c_char_p if name == "ncclGetErrorString" else STATUS

    def __getattr__(self, name):
        """A call that raises if its status is not ncclSuccess."""
        function = getattr(self.library, f"nccl{name}")

        def call(*arguments):
            status = function(*arguments)
            if status:
                raise RuntimeError(f"nccl{name}: {status}, {self.library.ncclGetErrorString(status).decode()}")

        return call


class Cuda:
    """The little of libcuda that a client needs."""

    def __init__(self, device):
        self.library = ctypes.CDLL("libcuda.so.1")
        context, handle = c_void_p(), c_int()
        self("cuInit", 0)
        self("cuDeviceGet", byref(handle), device)
        self("cuDevicePrimaryCtxRetain", byref(context), handle)
        self("cuCtxSetCurrent", context)

    def __call__(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def stream(self):
        stream = c_void_p()
        self("cuStreamCreate", byref(stream), 1)
        return stream

    def memory(self, size):
        pointer = c_ulonglong()
        self("cuMemAlloc_v2", byref(pointer), c_size_t(size))
        return pointer.value

    def write(self, pointer, data):
        self("cuMemcpyHtoD_v2", c_ulonglong(pointer), data, c_size_t(len(data)))

    def read(self, pointer, size):
        data = ctypes.create_string_buffer(size)
        self("cuMemcpyDtoH_v2", data, c_ulonglong(pointer), c_size_t(size))
        return data.raw


def packed(letter, numbers):
    return struct.pack(f"{len(numbers)}{letter}", *numbers)


def ranks(checks):
    rank, n, kept = checks.rank, checks.size, {}
    nccl = Nccl(checks.options.library)

    def symbols():
        missing = [name for name in nccl.missing if name not in OPTIONAL]
        assert not missing, f"not in the library: {missing}"

    def library():
        version = c_int()
        nccl.GetVersion(byref(version))
        assert version.value > 20000, version.value
        assert client.say_which(f"vllm_like rank {rank}"), f"loaded: {client.loaded()}"
        for status in range(9):
            assert nccl.library.ncclGetErrorString(status), status

    def begin():
        kept["cuda"] = Cuda(rank)
        kept["comm"] = new_comm("id", lambda comm, id: nccl.CommInitRank(byref(comm), n, id, rank))

    def new_comm(name, make):
        def id():
            made = UniqueId()
            nccl.GetUniqueId(byref(made))
            return bytes(made)

        comm = c_void_p()
        make(comm, UniqueId.from_buffer_copy(client.share(checks, name, id)))
        assert comm.value, "a NULL communicator"
        return comm

    def with_config():
        config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22700, 1, UNDEFINED, UNDEFINED, UNDEFINED, None, UNDEFINED, UNDEFINED, b"tp")
        comm = new_comm("config", lambda comm, id: nccl.CommInitRankConfig(byref(comm), n, id, rank, byref(config)))
        calls(comm)
        nccl.CommDestroy(comm)

    def calls(comm=None):
        comm, cuda = comm or kept["comm"], kept["cuda"]
        stream = cuda.stream()
        for count in (1, 1000, 100_003):
            for type, letter, width in ((FLOAT, "f", 4), (INT64, "q", 8)):
                size = count * width
                mine, got, whole = cuda.memory(size), cuda.memory(size), cuda.memory(n * size)
                part = [[i % 5 + r for i in range(count)] for r in range(n)]
                cuda.write(mine, packed(letter, part[rank]))
                everything = packed(letter, [value for p in part for value in p])
                sums = packed(letter, [sum(values) for values in zip(*part)])

                def expect(pointer, want, what):
                    cuda("cuStreamSynchronize", stream)
                    assert cuda.read(pointer, len(want)) == want, f"{what} of {count} x {letter}"

                nccl.AllReduce(mine, got, count, type, SUM, comm, stream)
                expect(got, sums, "AllReduce")
                nccl.AllReduce(mine, got, count, type, MAX, comm, stream)
                expect(got, packed(letter, part[n - 1]), "AllReduce max")
                nccl.AllGather(mine, whole, count, type, comm, stream)
                expect(whole, everything, "AllGather")
                nccl.ReduceScatter(whole, got, count, type, SUM, comm, stream)
                expect(got, packed(letter, [n * value for value in part[rank]]), "ReduceScatter")
                for root in range(n):
                    nccl.Reduce(mine, got, count, type, SUM, root, comm, stream)
                    if rank == root:
                        expect(got, sums, "Reduce")
                    nccl.Broadcast(mine, got, count, type, root, comm, stream)
                    expect(got, packed(letter, part[root]), "Broadcast")
                nccl.GroupStart()
                nccl.Send(mine, count, type, (rank + 1) % n, comm, stream)
                nccl.Recv(got, count, type, (rank - 1) % n, comm, stream)
                nccl.GroupEnd()
                expect(got, packed(letter, part[(rank - 1) % n]), "Send and Recv")
                for pointer in (mine, got, whole):
                    cuda("cuMemFree_v2", c_ulonglong(pointer))
        cuda("cuStreamDestroy_v2", stream)

    def windows():
        """Memory of ncclMemAlloc as a symmetric window, as both servers' allocators make it."""
        cuda, count = kept["cuda"], 1 << 20
        stream, pointer, window = cuda.stream(), c_void_p(), c_void_p()
        nccl.MemAlloc(byref(pointer), 4 * count)
        nccl.CommWindowRegister(kept["comm"], pointer, 4 * count, byref(window), 1)
        for turn in range(3):
            cuda.write(pointer.value, packed("f", [rank + turn] * count))
            nccl.AllReduce(pointer, pointer, count, FLOAT, SUM, kept["comm"], stream)
            cuda("cuStreamSynchronize", stream)
            assert cuda.read(pointer.value, 4 * count) == packed("f", [n * (n - 1) // 2 + n * turn] * count), f"turn {turn}"
        if window.value:
            nccl.CommWindowDeregister(kept["comm"], window)
        nccl.MemFree(pointer)

    def properties():
        if "ncclCommQueryProperties" in nccl.missing:
            raise client.Skipped("the library does not export ncclCommQueryProperties")
        # Longer than the struct of any version; its size, magic and version come first, as in ncclConfig_t.
        buffer = ctypes.create_string_buffer(4096)
        struct.pack_into("QII", buffer, 0, 4096, 0xCAFEBEEF, 22900)
        status = nccl.library.ncclCommQueryProperties(kept["comm"], buffer)
        if rank == 0:
            print(f"note properties: status {status}", flush=True)
        assert status in (0, 4, 5), status

    def end():
        nccl.CommDestroy(kept.pop("comm"))

    def abort():
        comm = new_comm("abort", lambda comm, id: nccl.CommInitRank(byref(comm), n, id, rank))
        nccl.CommAbort(comm)

    for check in (symbols, library, begin, calls, windows, properties, with_config, end, abort):
        checks.run(check.__name__, check)


if __name__ == "__main__":
    options = client.arguments(__doc__, library={"default": os.environ.get("VLLM_NCCL_SO_PATH", "libnccl.so.2")})
    sys.exit(client.ranks(ranks, options))
