"""Collectives between processes, over numpy arrays, torch tensors and other memory, without copies.

Every rank makes the same calls in the same order::

    import numpy, tinynccl

    with tinynccl.Comm.from_env() as comm:          # started by torchrun, mpirun, srun, or RANK and WORLD_SIZE
        gradient = numpy.full(1000, comm.rank, dtype=numpy.float32)
        comm.all_reduce(gradient, op="avg")         # in place

``import tinynccl.torch`` makes "tinynccl" a backend of ``torch.distributed``.
"""

import atexit as _atexit

from . import _core
from ._core import Comm, Group, Server, Work, __version__, cuda_device_count
from .errors import (
    Aborted,
    BootstrapError,
    ConfigError,
    CorruptError,
    CudaError,
    Error,
    InvalidArgument,
    Mismatch,
    PeerLost,
    ProtocolError,
    SystemFailure,
    Timeout,
    Unsupported,
)

__all__ = [
    "Aborted",
    "BootstrapError",
    "Comm",
    "ConfigError",
    "CorruptError",
    "CudaError",
    "Error",
    "Group",
    "InvalidArgument",
    "Mismatch",
    "PeerLost",
    "ProtocolError",
    "Server",
    "SystemFailure",
    "Timeout",
    "Unsupported",
    "Work",
    "__version__",
    "cuda_device_count",
]

# While threads and CUDA still work.
_atexit.register(_core._leave_all)
