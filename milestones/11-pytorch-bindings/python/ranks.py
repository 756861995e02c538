"""One rank: all calls over numpy arrays and torch tensors, depending on which of the two is installed."""

import sys

import tinynccl

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None


# EXERCISE 2 (Expected output; needs torch): average an array of four f32 over the ranks in place, gather
# (rank, rank squared) of all ranks, and print both as the README shows.
def arrays(comm):
    """numpy: the call works on the array's own memory."""
    rank, n = comm.rank, comm.size
    mine = numpy.arange(4, dtype=numpy.float32) + rank
    comm.all_reduce(mine, op="avg")
    print(f"numpy: all_reduce, average of {n} ranks: {mine}")

    everyone = numpy.empty((n, 2), dtype=numpy.int64)
    comm.all_gather(numpy.array([rank, rank * rank]), everyone)
    print(f"numpy: all_gather of (rank, rank squared): {everyone.tolist()}")


# EXERCISE 3 (Expected output; needs torch): all-reduce a bfloat16 tensor and show that it stays where it was; pass
# the ranks round the ring in a group; start a large all-reduce, compute meanwhile, wait. Print what the README shows.
def tensors(comm):
    """torch: the same calls. Nothing is copied: the result has the tensor's address."""
    rank, n = comm.rank, comm.size
    right, left = (rank + 1) % n, (rank - 1) % n
    mine = torch.full((3, 5), float(rank + 1), dtype=torch.bfloat16)
    before = mine.data_ptr()
    comm.all_reduce(mine)
    assert mine.data_ptr() == before and (mine == n * (n + 1) / 2).all()
    print(f"torch: all_reduce of bfloat16 (3, 5), at the same address as before: {mine[0, 0].item()}")

    message, answer = torch.tensor([rank]), torch.tensor([-1])
    with comm.group():
        comm.send(message, right)
        comm.recv(answer, left)
    print(f"torch: round the ring came {answer.item()} from rank {left}")

    large = torch.ones(1 << 20)
    work = comm.all_reduce(large, async_op=True)
    meanwhile = sum(range(100_000))
    work.wait()
    print(f"torch: asynchronous all_reduce of 4 MiB: {large[0].item()}, and meanwhile a sum was {meanwhile}")


# EXERCISE 4 (Expected output; needs torch): let rank 0 make a call of another length than the others, catch
# `tinynccl.Error`, and print its class and text.
def mistakes(comm):
    """Ranks with different calls get an exception that names both, where other libraries hang."""
    kind = numpy.zeros if torch is None else torch.zeros
    try:
        comm.all_reduce(kind(3 + (comm.rank == 0)))
    except tinynccl.Error as error:
        print(f"{type(error).__name__}: {error}")


def main():
    if numpy is None and torch is None:
        sys.exit(f"{sys.executable} has neither numpy nor torch: take the interpreter that `cargo run -p pytorch-bindings` names")
    # On a communicator of its own, because the mistake breaks it.
    with tinynccl.Comm.from_env() as comm:
        if numpy is not None:
            arrays(comm)
        else:
            print("numpy is not here: that part is left out")
        if torch is not None:
            tensors(comm)
        else:
            print("torch is not here: that part is left out")
        comm.barrier()
        if comm.size > 1:
            with comm.split(0) as other:
                mistakes(other)
        comm.barrier()
        if comm.rank == 0:
            print(f"OK: world of size {comm.size}")


main()
