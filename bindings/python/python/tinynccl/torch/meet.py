"""Builds a communicator from ranks that share a store of torch."""

import os
import time

from .. import Comm, Server
from ..errors import Timeout

# Seconds between two polls of the store: first and longest.
_FIRST, _LONGEST = 0.0005, 0.02
# Half of the library's default. torch's calls run beside the model's kernels, and a call occupies its SMs even while it
# waits for another rank. Large calls alone take 4 % longer (docs/benchmarks/2026-11-22-torch-gpu.md).
_CUDA_BLOCKS = 64


def is_expected(store, key):
    """Whether the first rank of ``key`` is there. Returns at once: ``get`` would wait, and a ``TCPStore`` that waits for one
    thread blocks all others, even the one whose ``set`` would end a wait elsewhere."""
    if hasattr(store, "check"):
        return store.check([f"tinynccl-{key}"])
    return store.add(f"tinynccl-{key}-there", 0) > 0


class Pauses:
    """Sleeps with an exponential backoff."""

    def __init__(self):
        self._next = _FIRST

    def sleep(self):
        time.sleep(self._next)
        self._next = min(2 * self._next, _LONGEST)


def meet(store, key, rank, size, timeout, late, stop=lambda: None):
    """A communicator of ``size`` ranks that share the store. If rank 0 does not arrive, the error begins with ``late``. The
    wait calls ``stop`` repeatedly, which may end it by an exception."""
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
