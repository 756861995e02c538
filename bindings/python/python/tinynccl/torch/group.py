"""``ProcessGroup``: the methods that torch calls, the way from them to the communicator, and messages."""

import threading
import weakref

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .. import InvalidArgument
from .collectives import Collectives
from .meet import Meeting, watch_world
from .messages import Channel, Deferred, FromAny, Message, close_channels
from .reconfigure import Reconfigurable, Unmade
from .streams import Sides
from .tensors import Plain, as_list, refusal
from .work import Kept, Work, seconds

# The store of the last default process group, of torch 2 as long as the next one is not there: a rank that is ahead may have
# reached the server of the old one, which then serves both. torch 1.13 cannot make two groups over one server.
_last_store = None
# The communicator of the default group that is made next, if its ranks have one already.
joined = None
# Of the default process group, while there is one of ours.
_world = lambda: None  # noqa: E731


class Group(Collectives):
    """The base of both kinds of groups below: ranks with a communicator of tinynccl."""

    def _join(self, store, rank, size, timeout, members=None, later=False):
        """``members``: the ranks' numbers in the world, if they are known. ``later``: ``reconfigure`` makes the communicator."""
        global _last_store, _world
        self._rank = rank
        self._size = size
        self._store = store
        self._timeout = seconds(timeout)
        # Of the world all others are parts, whose errors name ranks as the world does.
        is_world = not dist.is_initialized()
        if later:
            self._comm, self._names = Unmade(rank), None
        elif is_world and joined is not None:
            self._comm, self._names = joined, None
        else:
            names = None if is_world else list(members) if members else dist.get_rank
            watch = watch_world(None if is_world else _world(), members)
            late = f"rank {rank} of {size} waits for rank 0 of the group to begin"
            self._comm, self._names = Meeting(store, "group", self._timeout, watch).join(rank, size, late, names)
        self._me = self._world_rank(rank)
        if is_world:
            _world = weakref.ref(self)
            _last_store = store if torch.__version__ >= "2" else None
        self._sides = Sides()
        self._channels = {}
        self._closed = False
        # Of what threads share; a signal's handler may come into it once more.
        self._lock = threading.RLock()
        # Messages on the GPU that wait for their counterparts.
        self._deferred = []
        self._number = 0
        self._kept = Kept()
        # Works of the calls between `_start_coalescing` and `_end_coalescing`.
        self._coalesced = None

    def _world_rank(self, rank):
        """A rank's number in errors: that in the world."""
        return self._names[rank] if self._names else rank

    # Methods that torch calls.

    def getBackendName(self):
        return "tinynccl"

    def name(self):
        return "tinynccl"

    def _get_backend_name(self):
        return "tinynccl"

    def getRank(self):
        return self._rank

    def getSize(self):
        return self._size

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def _set_sequence_number_for_group(self):
        self._number = 0

    def _get_sequence_number_for_group(self):
        return self._number

    @property
    def comm(self):
        """The communicator, for calls that torch has no name for."""
        return self._comm

    def abort(self):
        self._comm.abort("abort was called on the process group")
        for channel in self._take_channels():
            channel.abort("abort was called on the process group")

    def shutdown(self):
        """Receives that are still posted end with an error. What is sent has a while to be received."""
        with self._lock:
            self._closed = True
        close_channels(self._take_channels(), self._timeout)
        self._comm.close()

    def _take_channels(self):
        with self._lock:
            channels = list(self._channels.values())
            if self._closed:
                self._channels.clear()
        return channels

    def __del__(self):
        # Only one that has joined has something to leave.
        if hasattr(self, "_coalesced"):
            self.shutdown()

    # From torch's calls to the communicator.

    def _check(self, call, tensors, written=()):
        """The device of tensors whose memory can be taken: one device, with values that lie there."""
        device = None
        for index, tensor in enumerate([*tensors, *written]):
            reason = refusal(tensor, index >= len(tensors))
            if reason is not None:
                raise InvalidArgument(f"{call}: rank {self._me}: tensor {index} {reason}")
            device = device or tensor.device
            if tensor.device != device:
                raise InvalidArgument(
                    f"{call}: rank {self._me}: tensor 0 is on {device}, tensor {index} on {tensor.device}: expected all on one device"
                )
        return device

    def _run(self, call, reads, writes, result, make, finish=None, scratch=(), parts=()):
        """Makes calls over tensors and memory of ours. ``make`` gets plain tensors for those that are read and for those that are
        written, and keyword arguments for the communicator; it returns a work. ``finish`` writes ``parts`` at the end."""
        device = self._check(call, reads, [*writes, *parts])
        self._number += 1
        self._flush()
        memory = Plain(reads, writes)
        finish = memory.then(finish)
        if device.type == "cuda":
            tensors = [*reads, *writes, *memory.reads, *memory.writes, *scratch, *parts]
            make_on = lambda **how: make(memory.reads, memory.writes, **how)  # noqa: E731
            return self._coalescing(self._on_stream(device, tensors, result, make_on, finish))
        work = Work.of(make(memory.reads, memory.writes, async_op=True), result, self._kept)
        return self._coalescing(work if finish is None else work._then(finish))

    def _coalescing(self, work):
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device=None):
        """torch's coalescing manager calls this when it is given a device. Calls start at once, in the order of our stream (or
        thread), so nothing needs to be held back: the manager only needs one work for all of them."""
        self._coalesced = []

    def _end_coalescing(self, device=None):
        works, self._coalesced = self._coalesced, None
        if not works:
            return Work.of(None, [], self._kept)
        *before, last = works
        if before:
            rest = last._finish

            def finish():
                for work in before:
                    work.wait()
                if rest is not None:
                    rest()

            last._then(finish)
        return last

    # torch 2.15's names of the same, of a backend.
    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def _on_stream(self, device, tensors, result, make, finish=None):
        """Enqueues calls on our stream, after the current stream's work, so they overlap with the caller's kernels."""
        side = self._sides[device]
        end = make(stream=side.behind_current())
        if finish is not None:
            with torch.inference_mode():
                side.as_current(finish)
            end = self._comm.mark(device.index, side.handle)
        for tensor in tensors:
            # The allocator does not give its memory away before our stream has passed this point.
            tensor.record_stream(side.stream)
        return Work.of(None, result, self._kept, end, side)

    def _group(self, calls, **how):
        """Runs several calls as one; ``calls`` makes them."""
        stream = how.get("stream")
        with self._comm.group(async_op="async_op" in how, stream=stream) as group:
            calls()
        return group.work

    # Messages. On GPUs tags are ignored: messages between two ranks arrive in the order in which they were sent.

    def send(self, tensors, peer, tag=0):
        return self._message(as_list(tensors)[0], self._rank, peer, tag)

    def recv(self, tensors, peer, tag=0):
        return self._message(as_list(tensors)[0], peer, self._rank, tag)

    def recv_anysource(self, tensors, tag=0):
        (tensor,) = as_list(tensors)
        senders = [rank for rank in range(self._size) if rank != self._rank]
        if not senders:
            raise InvalidArgument(f"recv: rank {self._me}: there is no other rank to receive from")
        if self._check("recv", [], [tensor]).type == "cuda":
            raise InvalidArgument(f"recv: rank {self._me}: a receive from any rank takes tensors on the CPU: on GPUs name the sender (src=)")
        message = FromAny(Plain([], [tensor]), tensor, tag, self._me, {rank: self._world_rank(rank) for rank in senders}, self._timeout)
        for sender in senders:
            self._channel(sender, self._rank).put(message)
        return Work.of(message, [tensor], self._kept)

    def _message(self, tensor, sender, receiver, tag):
        sends = sender == self._rank
        call, peer = ("send", receiver) if sends else ("recv", sender)
        if peer == self._rank or not 0 <= peer < self._size:
            raise InvalidArgument(f"{call}: rank {self._me}: peer is {peer}, expected another rank in 0..{self._size}")
        sides = ([tensor], []) if sends else ([], [tensor])
        if self._check(call, *sides).type == "cuda":
            work = Deferred.of(None, [tensor], self._kept)._as(self, Plain(*sides), sends, peer)
            with self._lock:
                self._deferred.append(work)
            return self._coalescing(work)
        message = Message(Plain(*sides), tensor, tag)
        work = Work.of(self._channel(sender, receiver).put(message), [tensor], self._kept)
        work._source = sender
        return self._coalescing(work)

    def _channel(self, sender, receiver):
        """The way from a rank to another, for whichever thread asks first."""
        pair = (sender, receiver)
        with self._lock:
            channel = self._channels.get(pair)
            if channel is None:
                if self._closed:
                    raise InvalidArgument(f"send/recv: rank {self._me}: the process group is closed")
                names = (self._world_rank(sender), self._world_rank(receiver))
                channel = Channel(self._store, self._comm, self._timeout, sender == self._rank, pair, names)
                self._channels[pair] = channel
            return channel

    def _flush(self):
        """Messages of the GPU go together: a kernel that only sends might wait for one that only comes behind its peer's."""
        if not self._deferred:
            return
        with self._lock:
            messages, self._deferred = self._deferred, []
        if not messages:
            return
        device = messages[0].tensor.device

        def calls():
            for message in messages:
                (self._comm.send if message.sends else self._comm.recv)(message.memory, message.peer)

        def finish():
            for message in messages:
                if message.finish is not None:
                    message.finish()

        tensors = [tensor for message in messages for tensor in (message.tensor, message.memory)]
        for message in messages:
            self._sides[device].stream.wait_event(message.ready)
        last = finish if any(message.finish for message in messages) else None
        work = self._on_stream(device, tensors, tensors, lambda **how: self._group(calls, **how), last)
        for message in messages:
            message._gpu_end, message._side = work._gpu_end, work._side


class ProcessGroup(Reconfigurable, Group, c10d.ProcessGroup):
    """A process group that is tinynccl's on every device: torch's functions call it directly."""

    def __init__(self, store, rank, size, timeout, members=None, later=False):
        c10d.ProcessGroup.__init__(self, rank, size)
        self._join(store, rank, size, timeout, members, later)

    # torch 2 asks a group for its backend of a device, and the backend for its capabilities.
    supports_coalescing = supports_splitting = False

    def _get_backend(self, device):
        return self

    get_backend = _get_backend

    # torch's own name is that of its backends.
    _name = ""

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        return self._name


# Before it could be made in Python, torch had no room for us in a group of several backends.
if hasattr(getattr(c10d, "Backend", None), "_start_coalescing"):

    class Backend(Group, c10d.Backend):
        """Of a process group that has other backends for other devices: torch's dispatcher calls it."""

        def __init__(self, store, rank, size, timeout, members=None):
            c10d.Backend.__init__(self, rank, size)
            self._join(store, rank, size, timeout, members)

        supports_coalescing = supports_splitting = False

else:
    Backend = None
