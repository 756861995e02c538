"""The extension module. ``Memory`` is a torch tensor, a numpy array, or anything with the buffer protocol,
``__cuda_array_interface__`` or ``__dlpack__``: contiguous. Counts are of elements; ``n`` is the number of ranks.

Calls return ``None`` when they are complete (on a GPU: when they are enqueued), or with ``async_op=True`` a ``Work``.
``stream`` is the handle of a CUDA stream, or a pair of handles. With a pair, the calls run in the first stream, after the
work that is in the second one now, and return their ``End``, which the types below leave out.
Every rank makes the same collective calls in the same order.
"""

from types import TracebackType
from typing import Any, Callable, Literal, Optional, Sequence, Union

Memory = Any
Stream = Union[int, tuple[int, int]]
Op = Literal["sum", "prod", "min", "max", "avg"]

__version__: str

class Work:
    """A call in flight, which keeps its memory alive. If it is dropped, the call continues."""

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Waits until the call is complete, at most ``timeout`` seconds; raises the call's error."""
    def is_completed(self) -> bool: ...
    def exception(self) -> Optional[BaseException]:
        """The call's error, if it has failed."""
    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Runs ``callback`` when the call is complete, in another thread; at once if it already is."""
    def complete_future(self, future: Any, result: Any) -> None:
        """Completes a torch future with ``result``, or with the call's error, when the call is complete."""

class End:
    """The end of the work that was enqueued on a stream."""

    def before(self, stream: int) -> None:
        """Orders all later work of ``stream`` after this; the host does not wait. Raises an error of the GPU."""
    def query(self) -> bool:
        """Whether the GPU has reached it. Raises CUDA's error, if earlier work failed."""

class Group:
    """The result of ``Comm.group``."""

    @property
    def work(self) -> Optional[Union[Work, End]]:
        """After the group: its handle with ``async_op=True``, or the calls' ``End`` with two streams."""
    def __enter__(self) -> "Group": ...
    def __exit__(
        self, type: Optional[type[BaseException]], value: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None: ...

class Server:
    """The rendezvous of a job. One process creates it and passes ``unique_id``, which holds the job's secret, to all ranks."""

    def __init__(self, world_size: int, port: int = 0) -> None: ...
    @property
    def unique_id(self) -> str: ...
    def close(self) -> None: ...

class Comm:
    """One rank's membership in a group of ranks."""

    def __init__(
        self,
        unique_id: str,
        rank: int,
        world_size: int,
        *,
        timeout: Optional[float] = None,
        transport: Optional[Literal["auto", "tcp", "shm", "verbs"]] = None,
        server: Optional[Server] = None,
        cuda_blocks: Optional[int] = None,
        ranks: Optional[Sequence[int]] = None,
        watch: Optional[Callable[[], object]] = None,
    ) -> None:
        """Joins the job of ``unique_id``. ``timeout``, in seconds, is the deadline of every wait. The rank that created the
        ``server`` of ``unique_id`` may pass it, and it then lives as long as the communicator. ``cuda_blocks``, the same on
        all ranks, is the maximum number of a GPU's blocks for a call (``TINYNCCL_CUDA_BLOCKS``). Errors call the ranks by the
        numbers ``ranks`` (of a larger job, for example). ``watch`` is called repeatedly while this waits for the other ranks;
        its exception ends the wait."""
    @staticmethod
    def from_env(
        *, timeout: Optional[float] = None, transport: Optional[Literal["auto", "tcp", "shm", "verbs"]] = None
    ) -> "Comm":
        """Joins the job of a launcher (torchrun, mpirun, srun, ours), or of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
    @staticmethod
    def from_ticket(
        ticket: str,
        *,
        timeout: Optional[float] = None,
        transport: Optional[Literal["auto", "tcp", "shm", "verbs"]] = None,
        cuda_blocks: Optional[int] = None,
    ) -> "Comm":
        """Joins a group that runs, once it takes newcomers in (``grow``); waits as long as the group lives."""
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def closed(self) -> bool: ...
    def all_reduce(
        self,
        input: Memory,
        output: Optional[Memory] = None,
        op: Op = "sum",
        *,
        async_op: bool = False,
        stream: Optional[Stream] = None,
    ) -> Optional[Work]:
        """Every rank's ``output`` (in place without one) becomes the element-wise reduction of all inputs."""
    def broadcast(
        self, buffer: Memory, root: int = 0, *, async_op: bool = False, stream: Optional[Stream] = None
    ) -> Optional[Work]:
        """Every rank's ``buffer`` becomes the root's."""
    def reduce(
        self,
        input: Memory,
        output: Optional[Memory] = None,
        op: Op = "sum",
        root: int = 0,
        *,
        async_op: bool = False,
        stream: Optional[Stream] = None,
    ) -> Optional[Work]:
        """The root's ``output`` (in place without one) becomes the reduction; elsewhere nothing changes."""
    def all_gather(
        self,
        input: Memory,
        output: Memory,
        recv_counts: Optional[Sequence[int]] = None,
        *,
        async_op: bool = False,
        stream: Optional[Stream] = None,
    ) -> Optional[Work]:
        """``output`` (``n`` times as long) becomes all inputs in rank order; with ``recv_counts``, inputs of those lengths."""
    def reduce_scatter(
        self, input: Memory, output: Memory, op: Op = "sum", *, async_op: bool = False, stream: Optional[Stream] = None
    ) -> Optional[Work]:
        """``output`` becomes our segment of the reduction of all inputs (``n`` times as long)."""
    def gather(
        self,
        input: Memory,
        output: Optional[Memory] = None,
        root: int = 0,
        *,
        async_op: bool = False,
        stream: Optional[Stream] = None,
    ) -> Optional[Work]:
        """The root's ``output`` becomes all inputs in rank order; elsewhere it is ignored."""
    def scatter(
        self,
        input: Optional[Memory],
        output: Memory,
        root: int = 0,
        *,
        async_op: bool = False,
        stream: Optional[Stream] = None,
    ) -> Optional[Work]:
        """``output`` becomes our segment of the root's ``input``; elsewhere ``input`` is ignored."""
    def all_to_all(
        self,
        input: Memory,
        output: Memory,
        send_counts: Optional[Sequence[int]] = None,
        recv_counts: Optional[Sequence[int]] = None,
        *,
        async_op: bool = False,
        stream: Optional[Stream] = None,
    ) -> Optional[Work]:
        """Segment ``r`` of ``output`` becomes our segment of rank r's ``input``; segments are equal, or of the given lengths."""
    def send(
        self, data: Memory, peer: int, *, async_op: bool = False, stream: Optional[Stream] = None
    ) -> Optional[Work]: ...
    def recv(
        self, data: Memory, peer: int, *, async_op: bool = False, stream: Optional[Stream] = None
    ) -> Optional[Work]: ...
    def probe(self, peer: int, timeout: float = 0.0) -> bool:
        """Whether a message from ``peer`` (on the CPU) can be received; waits for one up to ``timeout`` seconds. False is not
        an error. Before the first message between two ranks it waits for the peer's call, as ``recv`` does."""
    def barrier(self, *, async_op: bool = False) -> Optional[Work]:
        """No rank returns before all ranks have called it. Waits for our calls on the GPU first."""
    def group(self, *, async_op: bool = False, stream: Optional[Stream] = None) -> Group:
        """``with comm.group():`` collects this thread's calls and runs them together at its end."""
    def split(self, color: Optional[int], key: int = 0) -> Optional["Comm"]:
        """One communicator per colour, ranks ordered by ``key``; ``None`` for a rank without one. All ranks must call it."""
    def mark(self, device: int, stream: int) -> End:
        """The end of all work that is in a stream of that CUDA device."""
    def check(self) -> None:
        """Raises the communicator's failure or an error of the GPU, if there is one; waits for nothing."""
    def has_left(self, rank: int) -> bool:
        """True when that rank has left in order: a wait for it cannot succeed."""
    def abort(self, reason: str = ...) -> None:
        """Ends the communicator on all ranks, from any thread."""
    def revoke(self) -> None:
        """Ends the calls of all ranks, also of those that have not noticed a failure; ``agree``, ``shrink``, ``grow`` still work."""
    def agree(self, value: int = ...) -> tuple[int, list[int]]:
        """The bitwise and of the values of the ranks that live, and those ranks: the same on all of them, although ranks die."""
    def shrink(self) -> "Comm":
        """A communicator of the ranks that live, in their order; every one of them calls it. This one is not used any more."""
    def grow(self, size: int) -> "Comm":
        """``shrink`` that also takes in processes that wait (``from_ticket``), up to ``size`` ranks in all."""
    def ticket(self) -> str:
        """A text with which processes join this group later; it holds a secret."""
    @property
    def waiting(self) -> int:
        """Processes that wait at this rank to be taken in; a sum over all ranks counts them."""
    def close(self) -> None:
        """Finishes asynchronous calls and leaves the job."""
    def __enter__(self) -> "Comm": ...
    def __exit__(
        self, type: Optional[type[BaseException]], value: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None: ...

def cuda_device_count() -> int:
    """The number of GPUs that CUDA sees; 0 without CUDA."""
