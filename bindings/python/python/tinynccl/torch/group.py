"""``ProcessGroup``: the methods that torch calls, the way from them to the communicator, and messages."""

import datetime

import torch
from torch._C import _distributed_c10d as c10d

from .. import InvalidArgument
from .collectives import Collectives
from .meet import meet
from .messages import Channel, Deferred, FromAny, Message
from .streams import Sides
from .tensors import as_list
from .work import Work


class Group(Collectives):
    """The base of both kinds of groups below: ranks with a communicator of tinynccl."""

    def _join(self, store, rank, size, timeout):
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        late = f"rank {rank} of {size} waits for rank 0 of the group to begin"
        self._comm = meet(store, "group", rank, size, self._timeout, late)
        self._sides = Sides()
        self._channels = {}
        # Messages on the GPU that wait for their counterparts.
        self._deferred = []
        self._number = 0
        self._kept = {}
        # Works of the calls between `_start_coalescing` and `_end_coalescing`.
        self._coalesced = None

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
        for channel in self._channels.values():
            channel.abort("abort was called on the process group")

    def shutdown(self):
        for channel in self._channels.values():
            channel.close()
        for channel in self._channels.values():
            channel.join(self._timeout)
        self._channels.clear()
        self._comm.close()

    def __del__(self):
        for channel in getattr(self, "_channels", {}).values():
            channel.close()

    # From torch's calls to the communicator.

    def _check(self, call, tensors):
        """One device, no sparse tensors; the layout is checked again, tensor by tensor, where the memory is taken."""
        device = tensors[0].device
        for index, tensor in enumerate(tensors):
            if tensor.device != device:
                raise InvalidArgument(
                    f"{call}: rank {self._rank}: tensor 0 is on {device}, tensor {index} on {tensor.device}: expected all on one device"
                )
            if tensor.layout is not torch.strided:
                raise InvalidArgument(
                    f"{call}: rank {self._rank}: tensor {index} is of layout {tensor.layout}, expected torch.strided: "
                    "pass tensor.to_dense(), or its indices() and values()"
                )
        return device

    def _run(self, call, tensors, result, make, finish=None, scratch=()):
        """Makes calls over ``tensors`` and memory of ours: ``make`` gets keyword arguments for the communicator and returns a work."""
        self._number += 1
        device = self._check(call, tensors)
        self._flush()
        if device.type == "cuda":
            return self._coalescing(self._on_stream(device, [*tensors, *scratch], result, make, finish))
        work = Work.of(make(async_op=True), result, self._kept)
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

    def _on_stream(self, device, tensors, result, make, finish=None):
        """Enqueues calls on our stream, after the current stream's work, so they overlap with the caller's kernels."""
        side = self._sides[device]
        end = make(stream=side.behind_current())
        if finish is not None:
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
            raise InvalidArgument(f"recv: rank {self._rank}: there is no other rank to receive from")
        if self._contiguous("recv", tensor).type == "cuda":
            raise InvalidArgument(f"recv: rank {self._rank}: a receive from any rank takes tensors on the CPU: on GPUs name the sender (src=)")
        message = FromAny(tensor, tag, self._rank, senders, self._timeout)
        for sender in senders:
            self._channel(sender, self._rank).put(message)
        return Work.of(message, [tensor], self._kept)

    def _message(self, tensor, sender, receiver, tag):
        sends = sender == self._rank
        call, peer = ("send", receiver) if sends else ("recv", sender)
        if peer == self._rank or not 0 <= peer < self._size:
            raise InvalidArgument(f"{call}: rank {self._rank}: peer is {peer}, expected another rank in 0..{self._size}")
        if self._contiguous(call, tensor).type == "cuda":
            work = Deferred.of(None, [tensor], self._kept)._as(self, sends, peer)
            self._deferred.append(work)
            return self._coalescing(work)
        work = Work.of(self._channel(sender, receiver).put(Message(tensor, tag)), [tensor], self._kept)
        work._source = sender
        return self._coalescing(work)

    def _contiguous(self, call, tensor):
        """The device of a tensor that can be a message."""
        device = self._check(call, [tensor])
        if not tensor.is_contiguous():
            raise InvalidArgument(
                f"{call}: rank {self._rank}: a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous: "
                "pass tensor.contiguous()"
            )
        return device

    def _channel(self, sender, receiver):
        pair = (sender, receiver)
        channel = self._channels.get(pair)
        if channel is None:
            channel = self._channels[pair] = Channel(self._store, self._timeout, sender == self._rank, sender, receiver)
        return channel

    def _flush(self):
        """Messages of the GPU go together: a kernel that only sends might wait for one that only comes behind its peer's."""
        if not self._deferred:
            return
        messages, self._deferred = self._deferred, []
        device = messages[0].tensor.device

        def calls():
            for message in messages:
                (self._comm.send if message.sends else self._comm.recv)(message.tensor, message.peer)

        tensors = [message.tensor for message in messages]
        for message in messages:
            self._sides[device].stream.wait_event(message.ready)
        work = self._on_stream(device, tensors, tensors, lambda **how: self._group(calls, **how))
        for message in messages:
            message._gpu_end, message._side = work._gpu_end, work._side


class ProcessGroup(Group, c10d.ProcessGroup):
    """A process group that is tinynccl's on every device: torch's functions call it directly."""

    def __init__(self, store, rank, size, timeout):
        c10d.ProcessGroup.__init__(self, rank, size)
        self._join(store, rank, size, timeout)

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

        def __init__(self, store, rank, size, timeout):
            c10d.Backend.__init__(self, rank, size)
            self._join(store, rank, size, timeout)

        supports_coalescing = supports_splitting = False

else:
    Backend = None
