"""How ranks that share a store of torch become a communicator."""

import os
import time

from .. import Comm, Server
from ..errors import Timeout

# Between two looks at the store, in seconds: first and longest.
_FIRST, _LONGEST = 0.0005, 0.02
# Half of what the library takes by itself: torch's calls run beside the model's kernels, which wait for multiprocessors that a call
# occupies, also while that waits for another rank. Large calls by themselves take 4 % longer (docs/benchmarks/2026-11-22-torch-gpu.md).
_CUDA_BLOCKS = 64


def is_expected(store, key):
    """Whether the first rank of ``key`` is there. Returns at once: ``get`` would wait, and a ``TCPStore`` that waits for one thread
    takes nothing from the others, not even what ends the wait elsewhere."""
    if hasattr(store, "check"):
        return store.check([f"tinynccl-{key}"])
    return store.add(f"tinynccl-{key}-there", 0) > 0


class Pauses:
    """Sleeps that get longer."""

    def __init__(self):
        self._next = _FIRST

    def sleep(self):
        time.sleep(self._next)
        self._next = min(2 * self._next, _LONGEST)


def meet(store, key, rank, size, timeout, late, stop=lambda: None):
    """A communicator of ``size`` ranks that know the store. ``late`` is said of rank 0 if it does not come; ``stop`` is asked now and
    then, and raises what ends the wait."""
    server = None
    if rank == 0:
        server = Server(size)
        unique_id = server.unique_id
        store.set(f"tinynccl-{key}", unique_id)
        store.add(f"tinynccl-{key}-there", 1)
    else:
        end, pauses = time.monotonic() + timeout, Pauses()
        while not is_expected(store, key):
            stop()
            if time.monotonic() > end:
                raise Timeout(f"{late}: nothing came for {timeout} s")
            pauses.sleep()
        unique_id = store.get(f"tinynccl-{key}").decode()
    blocks = None if "TINYNCCL_CUDA_BLOCKS" in os.environ else _CUDA_BLOCKS
    return Comm(unique_id, rank, size, timeout=timeout, server=server, cuda_blocks=blocks)
