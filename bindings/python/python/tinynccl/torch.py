"""The backend "tinynccl" of ``torch.distributed``, for tensors of the CPU and of CUDA devices.

Importing it registers the backend::

    import tinynccl.torch
    torch.distributed.init_process_group("tinynccl")

Ranks meet through the store that ``init_process_group`` makes. Each process group is a communicator of its own. Works with
torch 1.13 and with torch 2.
"""

import datetime
import itertools
import threading
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from . import Comm, InvalidArgument, Server
from .errors import Error

__all__ = ["ProcessGroup", "Work"]

_OPERATORS = [
    (dist.ReduceOp.SUM, "sum"),
    (getattr(dist.ReduceOp, "AVG", None), "avg"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "prod"),
]


def _operator(opts, rank, call):
    """The operator of an opts object, or given by itself."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return "sum"
    for known, name in _OPERATORS:
        if known is not None and op == known:
            return name
    raise InvalidArgument(f"{call}: rank {rank}: operator {op}, expected SUM, AVG, MIN, MAX or PRODUCT")


def _tensors(tensors):
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


# Calls in flight that nobody has asked for yet.
_KEPT = 256


class Work(c10d.Work):
    """A call in flight, as ``torch.distributed`` sees it. ``wait`` raises what the call failed with."""

    def __init__(self, works, result, finish=None, event=None, devices=(), source=None):
        super().__init__()
        self._kept = None
        self._works = works
        self._result = result
        self._finish = finish
        self._event = event
        self._devices = devices
        self._source = source
        self._future = None
        self._lock = threading.Lock()

    def _keep(self, kept):
        """torch 1.13 forgets the Python half of an object that only C++ holds: this one stays until somebody has asked for its
        end, or many have come after it."""
        self._kept = kept
        kept[id(self)] = self
        if len(kept) > _KEPT:
            kept.pop(next(iter(kept)), None)
        return self

    def _release(self):
        if self._kept is not None:
            self._kept.pop(id(self), None)
            self._kept = None

    def wait(self, timeout=None):
        self._release()
        seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        for work in self._works:
            work.wait(seconds or None)
        self._end()
        if self._event is not None:
            self._event.wait()
        return True

    def _end(self):
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()

    def synchronize(self):
        self.wait()

    def is_completed(self):
        if not all(work.is_completed() for work in self._works):
            return False
        if self._event is not None and not self._event.query():
            return False
        if self.exception() is None:
            self._end()
        return True

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        return next((e for e in (work.exception() for work in self._works) if e is not None), None)

    def result(self):
        self.wait()
        return self._result

    def source_rank(self):
        return self._source

    _source_rank = source_rank

    def get_future(self):
        if self._future is None:
            self._future = torch.futures.Future(devices=list(self._devices)) if self._devices else torch.futures.Future()
            self._complete_later()
        self._release()
        return self._future

    def _complete_later(self):
        if self._event is not None:
            # It is the stream that completes: the future records it.
            with torch.cuda.stream(self._event.stream):
                self._end()
                self._future.set_result(self._result)
            return
        left = itertools.count(len(self._works), -1)
        next(left)

        def one_done():
            if next(left) > 0:
                return
            error = self.exception()
            if error is not None:
                self._future.set_exception(error)
                return
            try:
                self._end()
            except Exception as failure:
                self._future.set_exception(failure)
                return
            self._future.set_result(self._result)

        if not self._works:
            self._end()
            self._future.set_result(self._result)
        for work in self._works:
            work.add_done_callback(one_done)


class _Event:
    """The end of calls on a communication stream."""

    def __init__(self, stream, comm):
        self.stream = stream
        self._comm = comm
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self):
        """The current stream waits; the host does not."""
        self._comm.check()
        torch.cuda.current_stream(self.stream.device).wait_event(self._event)

    def query(self):
        return self._event.query()


class _Message:
    """A message in flight: a tinynccl ``Work`` that a thread of ours completes."""

    def __init__(self, tensor):
        self.tensor = tensor
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._error = None
        self._callbacks = []

    def complete(self, error=None):
        with self._lock:
            self._error = error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def wait(self, timeout=None):
        if not self._done.wait(timeout):
            raise Error(f"send/recv: still in flight after {timeout} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self):
        return self._done.is_set()

    def exception(self):
        return self._error

    def add_done_callback(self, callback):
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()


class _Channel:
    """Messages from one rank to another, in order, in a thread of its own: a message never waits for one of another pair or
    of the other direction. The first one makes a communicator of the two ranks."""

    def __init__(self, store, timeout, sends, sender, receiver):
        self._store, self._timeout, self._sends = store, timeout, sends
        self._key = f"message-{sender}-{receiver}"
        self._queue = SimpleQueue()
        self._comm = None
        self._error = None
        self._thread = threading.Thread(target=self._serve, name=f"tinynccl-{self._key}", daemon=True)
        self._thread.start()

    def put(self, tensor):
        message = _Message(tensor)
        self._queue.put(message)
        return message

    def close(self):
        self._queue.put(None)

    def abort(self, reason):
        if self._comm is not None:
            self._comm.abort(reason)

    def _serve(self):
        # Of two ranks: the sender is 0, the receiver 1.
        while True:
            message = self._queue.get()
            if message is None:
                break
            try:
                if self._error is not None:
                    raise self._error
                if self._comm is None:
                    self._comm = _meet(self._store, self._key, int(not self._sends), 2, self._timeout)
                if self._sends:
                    self._comm.send(message.tensor, 1)
                else:
                    self._comm.recv(message.tensor, 0)
                message.complete()
            except Exception as error:
                self._error = error
                message.complete(error)
        if self._comm is not None:
            self._comm.close()


def _meet(store, key, rank, size, timeout):
    """A communicator of ``size`` ranks that know the store."""
    server = None
    if rank == 0:
        server = Server(size)
        store.set(f"tinynccl-{key}", server.unique_id)
        unique_id = server.unique_id
    else:
        unique_id = store.get(f"tinynccl-{key}").decode()
    return Comm(unique_id, rank, size, timeout=timeout, server=server)


class ProcessGroup(c10d.ProcessGroup):
    """A process group of ranks that have a communicator of tinynccl."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        self._comm = _meet(store, "group", rank, size, self._timeout)
        self._streams = {}
        self._channels = {}
        # Messages on the GPU that wait for their counterparts: each as (send, tensor, peer, work's event holder).
        self._deferred = []
        self._number = 0
        self._kept = {}

    # What torch asks of a group.

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
        """The communicator, for what torch has no name for."""
        return self._comm

    def abort(self):
        self._comm.abort("abort was called on the process group")
        for channel in self._channels.values():
            channel.abort("abort was called on the process group")

    def shutdown(self):
        for channel in self._channels.values():
            channel.close()
        for channel in self._channels.values():
            channel._thread.join(self._timeout)
        self._channels.clear()
        self._comm.close()

    def __del__(self):
        for channel in getattr(self, "_channels", {}).values():
            channel.close()

    # How calls are made.

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

    def _stream(self, device):
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device, priority=-1)
        return stream

    def _run(self, call, tensors, result, make, finish=None, scratch=()):
        """Makes calls over ``tensors`` and memory of ours: ``make`` gets keyword arguments for the communicator and returns a work."""
        self._number += 1
        device = self._check(call, tensors)
        if device.type == "cuda":
            self._flush()
            work = self._on_stream(device, [*tensors, *scratch], result, make, finish)
        else:
            work = Work([make(async_op=True)], result, finish)
        return work._keep(self._kept)

    def _on_stream(self, device, tensors, result, make, finish=None):
        """On our stream, behind what is on the current one, so that calls overlap with the caller's kernels."""
        stream = self._stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            make(stream=stream.cuda_stream)
            if finish is not None:
                finish()
        for tensor in tensors:
            # The allocator does not give its memory away before our stream has passed this point.
            tensor.record_stream(stream)
        return Work([], result, None, _Event(stream, self._comm), devices=[device])

    def _group(self, calls, **how):
        """Several calls as one; ``calls`` makes them."""
        stream = how.get("stream")
        with self._comm.group(async_op="async_op" in how, stream=stream) as group:
            calls()
        return group.work

    # Collectives.

    def allreduce(self, tensors, opts=None):
        tensors = _tensors(tensors)
        op = _operator(opts, self._rank, "all_reduce")
        if len(tensors) == 1:
            one = tensors[0]
            return self._run("all_reduce", tensors, tensors, lambda **how: self._comm.all_reduce(_real(one), op=op, **how))
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors, opts=None):
        tensors = _tensors(tensors)
        op = _operator(opts, self._rank, "all_reduce")

        def calls():
            for tensor in tensors:
                self._comm.all_reduce(_real(tensor), op=op)

        return self._run("all_reduce", tensors, tensors, lambda **how: self._group(calls, **how))

    def broadcast(self, tensors, opts=None):
        tensors = _tensors(tensors)
        root = getattr(opts, "rootRank", opts) or 0

        def calls():
            for tensor in tensors:
                self._comm.broadcast(tensor, root)

        if len(tensors) == 1:
            return self._run("broadcast", tensors, tensors, lambda **how: self._comm.broadcast(tensors[0], root, **how))
        return self._run("broadcast", tensors, tensors, lambda **how: self._group(calls, **how))

    def reduce(self, tensors, opts=None):
        tensors = _tensors(tensors)
        op = _operator(opts, self._rank, "reduce")
        root = getattr(opts, "rootRank", 0)
        return self._run(
            "reduce", tensors, tensors, lambda **how: self._comm.reduce(_real(tensors[0]), op=op, root=root, **how)
        )

    def _allgather_base(self, output, input, opts=None):
        return self._run("all_gather", [input, output], output, lambda **how: self._comm.all_gather(input, output, **how))

    def allgather_into_tensor(self, output, input, opts=None):
        return self._allgather_base(output, input, opts)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        return self._many(
            "all_gather", inputs, outputs, lambda input, output: self._comm.all_gather(input, output), outputs
        )

    def allgather(self, outputs, inputs, opts=None):
        """Lists of tensors: one list of ``size`` per input."""
        inputs = _tensors(inputs)
        if outputs and isinstance(outputs[0], torch.Tensor):
            outputs = [outputs]
        if len(inputs) != 1 or len(outputs) != 1:
            raise InvalidArgument(
                f"all_gather: rank {self._rank}: {len(inputs)} inputs and {len(outputs)} lists of outputs, expected one of each"
            )
        return self._gather_lists("all_gather", inputs[0], outputs[0], outputs)

    def _gather_lists(self, call, input, parts, result):
        if len(parts) != self._size:
            raise InvalidArgument(f"{call}: rank {self._rank}: {len(parts)} output tensors, expected {self._size}, one per rank")
        self._like(call, parts, input)
        if all(part.numel() == input.numel() for part in parts):
            flat = torch.empty(self._size * input.numel(), dtype=input.dtype, device=input.device)
            return self._run(
                call,
                [input, *parts],
                result,
                lambda **how: self._comm.all_gather(input, flat, **how),
                lambda: _spread(flat, parts),
                [flat],
            )
        # Lengths that differ.
        flat = torch.empty(sum(part.numel() for part in parts), dtype=input.dtype, device=input.device)
        counts = [part.numel() for part in parts]
        return self._run(
            call,
            [input, *parts],
            result,
            lambda **how: self._comm.all_gather(input, flat, counts, **how),
            lambda: _spread(flat, parts),
            [flat],
        )

    def allgather_coalesced(self, outputs, inputs, opts=None):
        """``outputs[r][i]`` becomes rank r's ``inputs[i]``."""
        flats = [torch.empty(self._size * t.numel(), dtype=t.dtype, device=t.device) for t in inputs]

        def finish():
            for i, flat in enumerate(flats):
                _spread(flat, [of_rank[i] for of_rank in outputs])

        def calls():
            for input, flat in zip(inputs, flats):
                self._comm.all_gather(input, flat)

        return self._run("all_gather", list(inputs), outputs, lambda **how: self._group(calls, **how), finish, flats)

    def _reduce_scatter_base(self, output, input, opts=None):
        op = _operator(opts, self._rank, "reduce_scatter")
        return self._run(
            "reduce_scatter",
            [input, output],
            output,
            lambda **how: self._comm.reduce_scatter(_real(input), _real(output), op, **how),
        )

    def reduce_scatter_tensor(self, output, input, opts=None):
        return self._reduce_scatter_base(output, input, opts)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        op = _operator(opts, self._rank, "reduce_scatter")
        return self._many(
            "reduce_scatter",
            inputs,
            outputs,
            lambda input, output: self._comm.reduce_scatter(_real(input), _real(output), op),
            outputs,
        )

    def reduce_scatter(self, outputs, inputs, opts=None):
        """One list of ``size`` inputs per output."""
        outputs = _tensors(outputs)
        if inputs and isinstance(inputs[0], torch.Tensor):
            inputs = [inputs]
        op = _operator(opts, self._rank, "reduce_scatter")
        output, parts = outputs[0], inputs[0]
        if len(parts) != self._size:
            raise InvalidArgument(
                f"reduce_scatter: rank {self._rank}: {len(parts)} input tensors, expected {self._size}, one per rank"
            )
        self._like("reduce_scatter", parts, output)
        if any(part.numel() != output.numel() for part in parts):
            if parts[self._rank].numel() != output.numel():
                raise InvalidArgument(
                    f"reduce_scatter: rank {self._rank}: the output has {output.numel()} elements, input {self._rank} "
                    f"{parts[self._rank].numel()}: expected equal lengths"
                )

            def calls():
                for root, part in enumerate(parts):
                    copy = part.clone().reshape(-1)
                    held.append(copy)
                    self._comm.reduce(_real(copy), op=op, root=root)

            held = []
            return self._run(
                "reduce_scatter",
                [output, *parts],
                outputs,
                lambda **how: self._group(calls, **how),
                lambda: output.copy_(held[self._rank].view_as(output)),
            )
        flat = torch.cat([part.reshape(-1) for part in parts])
        return self._run(
            "reduce_scatter",
            [output, *parts],
            outputs,
            lambda **how: self._comm.reduce_scatter(_real(flat), _real(output), op, **how),
            scratch=[flat],
        )

    def gather(self, outputs, inputs, opts=None):
        input = _tensors(inputs)[0]
        root = getattr(opts, "rootRank", 0)
        if self._rank != root:
            return self._run("gather", [input], outputs, lambda **how: self._comm.gather(input, None, root, **how))
        parts = outputs[0] if outputs and not isinstance(outputs[0], torch.Tensor) else outputs
        if len(parts) != self._size:
            raise InvalidArgument(f"gather: rank {self._rank}: {len(parts)} output tensors, expected {self._size}, one per rank")
        self._like("gather", parts, input, lengths=True)
        flat = torch.empty(self._size * input.numel(), dtype=input.dtype, device=input.device)
        return self._run(
            "gather",
            [input, *parts],
            outputs,
            lambda **how: self._comm.gather(input, flat, root, **how),
            lambda: _spread(flat, parts),
            [flat],
        )

    def scatter(self, outputs, inputs, opts=None):
        output = _tensors(outputs)[0]
        root = getattr(opts, "rootRank", 0)
        if self._rank != root:
            return self._run("scatter", [output], outputs, lambda **how: self._comm.scatter(None, output, root, **how))
        parts = inputs[0] if inputs and not isinstance(inputs[0], torch.Tensor) else inputs
        if len(parts) != self._size:
            raise InvalidArgument(f"scatter: rank {self._rank}: {len(parts)} input tensors, expected {self._size}, one per rank")
        self._like("scatter", parts, output, lengths=True)
        flat = torch.cat([part.reshape(-1) for part in parts])
        return self._run(
            "scatter",
            [output, *parts],
            outputs,
            lambda **how: self._comm.scatter(flat, output, root, **how),
            scratch=[flat],
        )

    def alltoall_base(self, output, input, output_splits=None, input_splits=None, opts=None):
        if not output_splits and not input_splits:
            make = lambda **how: self._comm.all_to_all(input, output, **how)  # noqa: E731
        else:
            counts = []
            for which, tensor, splits in (("output", output, output_splits), ("input", input, input_splits)):
                rows = tensor.shape[0] if tensor.dim() else 1
                splits = list(splits) if splits else [rows // self._size] * self._size
                if len(splits) != self._size or sum(splits) != rows:
                    raise InvalidArgument(
                        f"all_to_all: rank {self._rank}: the {which} has {rows} rows and splits {splits}, expected {self._size} "
                        "splits that add up to it"
                    )
                row = tensor.numel() // rows if rows else 0
                counts.append([split * row for split in splits])
            make = lambda **how: self._comm.all_to_all(input, output, counts[1], counts[0], **how)  # noqa: E731
        return self._run("all_to_all", [input, output], output, make)

    def alltoall(self, outputs, inputs, opts=None):
        if len(outputs) != self._size or len(inputs) != self._size:
            raise InvalidArgument(
                f"all_to_all: rank {self._rank}: {len(inputs)} inputs and {len(outputs)} outputs, expected {self._size} of each"
            )
        self._like("all_to_all", [*outputs, *inputs], inputs[0])
        flat_in = torch.cat([t.reshape(-1) for t in inputs])
        flat_out = torch.empty(sum(t.numel() for t in outputs), dtype=flat_in.dtype, device=flat_in.device)
        send, recv = [t.numel() for t in inputs], [t.numel() for t in outputs]
        return self._run(
            "all_to_all",
            [*inputs, *outputs],
            outputs,
            lambda **how: self._comm.all_to_all(flat_in, flat_out, send, recv, **how),
            lambda: _spread(flat_out, outputs),
            [flat_in, flat_out],
        )

    def barrier(self, opts=None):
        self._number += 1
        self._flush()
        if self._streams:
            for stream in self._streams.values():
                torch.cuda.current_stream(stream.device).synchronize()
        return Work([self._comm.barrier(async_op=True)], [])._keep(self._kept)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """The error at the deadline names the ranks that have not come."""
        self.barrier().wait(timeout)

    def _many(self, call, inputs, outputs, one, result):
        inputs, outputs = _tensors(inputs), _tensors(outputs)

        def calls():
            for input, output in zip(inputs, outputs):
                one(input, output)

        return self._run(call, [*inputs, *outputs], result, lambda **how: self._group(calls, **how))

    def _like(self, call, tensors, like, lengths=False):
        for index, tensor in enumerate(tensors):
            if tensor.dtype != like.dtype or tensor.device != like.device or (lengths and tensor.numel() != like.numel()):
                raise InvalidArgument(
                    f"{call}: rank {self._rank}: tensor {index} of the list is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
                    f"expected {like.dtype} {tuple(like.shape)} on {like.device}"
                )

    # Messages. Tags are not looked at: between two ranks messages arrive in the order in which they were sent.

    def send(self, tensors, peer, tag=0):
        return self._message(_tensors(tensors)[0], self._rank, peer)

    def recv(self, tensors, peer, tag=0):
        return self._message(_tensors(tensors)[0], peer, self._rank)

    def recv_anysource(self, tensors, tag=0):
        raise Error(f"recv: rank {self._rank}: a receive from any rank is not supported: name the sender (src=)")

    def _message(self, tensor, sender, receiver):
        sends = sender == self._rank
        call, peer = ("send", receiver) if sends else ("recv", sender)
        if peer == self._rank or not 0 <= peer < self._size:
            raise InvalidArgument(f"{call}: rank {self._rank}: peer is {peer}, expected another rank in 0..{self._size}")
        device = self._check(call, [tensor])
        if not tensor.is_contiguous():
            raise InvalidArgument(
                f"{call}: rank {self._rank}: a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous: "
                "pass tensor.contiguous()"
            )
        if device.type == "cuda":
            work = _Deferred(self, sends, tensor, peer)
            self._deferred.append(work)
        else:
            pair = (sender, receiver)
            channel = self._channels.get(pair)
            if channel is None:
                channel = self._channels[pair] = _Channel(self._store, self._timeout, sends, sender, receiver)
            work = Work([channel.put(tensor)], [tensor], source=sender)
        return work._keep(self._kept)

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
        work = self._on_stream(device, tensors, tensors, lambda **how: self._group(calls, **how))
        for message in messages:
            message._event = work._event


class _Deferred(Work):
    """A message between GPUs: it starts when it is waited for, or with the next call of the group."""

    def __init__(self, group, sends, tensor, peer):
        super().__init__([], [tensor], devices=[tensor.device], source=group._rank if sends else peer)
        self._group, self.sends, self.tensor, self.peer = group, sends, tensor, peer

    def wait(self, timeout=None):
        self._group._flush()
        return super().wait(timeout)

    def is_completed(self):
        self._group._flush()
        return super().is_completed()

    def get_future(self):
        self._group._flush()
        return super().get_future()


def _real(tensor):
    """Complex numbers as pairs of real ones: sums of them are sums of both."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _spread(flat, parts):
    """Parts of a flat tensor to where they belong."""
    at = 0
    for part in parts:
        part.copy_(flat[at : at + part.numel()].view(part.shape))
        at += part.numel()


def _create(store, rank, size, timeout):
    return ProcessGroup(store, rank, size, timeout)


def _register():
    if hasattr(dist.Backend, "TINYNCCL"):
        return
    try:
        dist.Backend.register_backend("tinynccl", _create, devices=["cpu", "cuda"])
    except TypeError:
        # Before torch 2.
        dist.Backend.register_backend("tinynccl", _create)


_register()
