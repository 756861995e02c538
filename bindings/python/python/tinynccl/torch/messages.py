"""Messages: each pair of ranks and direction has a communicator and a thread of its own; on GPUs they go together."""

import struct
import threading
from collections import defaultdict, deque
from queue import SimpleQueue

import torch

from ..errors import Mismatch, Timeout
from .meet import meet
from .work import Work


# What goes before each message: tag, bytes, type.
_HEADER = struct.Struct("<qq24s")


class Message:
    """A message in flight: what ``tinynccl.Work`` is for a call, of one that a thread of ours completes."""

    def __init__(self, tensor, tag):
        self.tensor, self.tag = tensor, tag
        # What goes over the wire: the receiver may have to take it before it knows which type it wants.
        self.data = tensor.detach().view(-1).view(torch.uint8)
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._error = None
        self._callbacks = []

    def complete_future(self, future, result):
        def tell():
            future.call = None
            if self._error is None:
                future.set_result(result)
            else:
                future.set_exception(self._error)

        self.add_done_callback(tell)

    def complete(self, error=None):
        with self._lock:
            if self._done.is_set():
                return
            self._error = error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def wait(self, timeout=None):
        if not self._done.wait(timeout):
            raise Timeout(f"send/recv: still in flight after {timeout} s")
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


class Channel:
    """Messages from one rank to another, in a thread of their own: a message never waits for one of another pair or of the
    other direction. The first one makes a communicator of the two ranks. Messages of one tag arrive in order; one whose tag
    nobody has asked for yet is put aside."""

    def __init__(self, store, timeout, sends, sender, receiver):
        self._store, self._timeout, self._sends = store, timeout, sends
        self._sender, self._receiver = sender, receiver
        self._key = f"message-{sender}-{receiver}"
        self._queue = SimpleQueue()
        self._comm = None
        self._error = None
        # Of the receiver, by tag: what was asked for, and what came before it was.
        self._asked = defaultdict(deque)
        self._aside = defaultdict(deque)
        self._thread = threading.Thread(target=self._serve, name=f"tinynccl-{self._key}", daemon=True)
        self._thread.start()

    def put(self, tensor, tag):
        message = Message(tensor, tag)
        self._queue.put(message)
        return message

    def close(self):
        self._queue.put(None)

    def abort(self, reason):
        if self._comm is not None:
            self._comm.abort(reason)

    def join(self, timeout):
        self._thread.join(timeout)

    def _serve(self):
        # Of two ranks: the sender is 0, the receiver 1.
        while (message := self._queue.get()) is not None:
            try:
                if self._error is not None:
                    raise self._error
                if self._comm is None:
                    self._comm = meet(self._store, self._key, int(not self._sends), 2, self._timeout)
                if self._sends:
                    self._comm.send(_header(message), 1)
                    self._comm.send(message.data, 1)
                    message.complete()
                else:
                    self._ask(message)
                    while any(self._asked.values()):
                        self._take()
            except Exception as error:
                self._error = error
                message.complete(error)
                for asked in self._asked.values():
                    while asked:
                        asked.popleft().complete(error)
        if self._comm is not None:
            self._comm.close()

    def _ask(self, message):
        aside = self._aside[message.tag]
        if aside:
            kind, data = aside.popleft()
            self._fits(message, kind, data.numel())
            message.data.copy_(data)
            message.complete()
        else:
            self._asked[message.tag].append(message)

    def _take(self):
        """The next message that comes."""
        header = bytearray(_HEADER.size)
        self._comm.recv(header, 0)
        tag, length, kind = _HEADER.unpack(header)
        # What was asked for meanwhile.
        while not self._queue.empty():
            message = self._queue.get()
            if message is None:
                self._queue.put(None)
                break
            self._ask(message)
        asked = self._asked[tag]
        if asked and self._fits(asked[0], kind, length):
            self._comm.recv(asked[0].data, 0)
            asked.popleft().complete()
        else:
            data = torch.empty(length, dtype=torch.uint8)
            self._comm.recv(data, 0)
            self._aside[tag].append((kind, data))

    def _fits(self, message, kind, length):
        if (kind, length) == (_kind(message.tensor), message.data.numel()):
            return True
        text = (
            f"recv: rank {self._receiver} and rank {self._sender} disagree: rank {self._receiver} receives {message.data.numel()} bytes of "
            f"{message.tensor.dtype} with tag {message.tag}, rank {self._sender} sent {length} bytes of {kind.rstrip(bytes(1)).decode()}"
        )
        self._comm.abort(text)
        raise Mismatch(text)


def _kind(tensor):
    return str(tensor.dtype).encode()[:24].ljust(24, bytes(1))


def _header(message):
    return bytearray(_HEADER.pack(message.tag, message.data.numel(), _kind(message.tensor)))


class Deferred(Work):
    """A message between GPUs: it starts when it is waited for, or with the next call of the group."""

    def _as(self, group, sends, peer):
        (self.tensor,) = self._result
        self._devices = (self.tensor.device,)
        self._source = group._rank if sends else peer
        self._group, self.sends, self.peer = group, sends, peer
        return self

    def wait(self, timeout=None):
        self._group._flush()
        return super().wait(timeout)

    def is_completed(self):
        self._group._flush()
        return super().is_completed()

    def get_future(self):
        self._group._flush()
        return super().get_future()
