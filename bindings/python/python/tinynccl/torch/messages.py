"""Messages: each pair of ranks and direction has a communicator and a thread of its own; on GPUs they go together."""

import struct
import threading
import time
from collections import defaultdict, deque
from queue import Empty, SimpleQueue

import torch

from ..errors import Aborted, Error, Mismatch, Timeout
from .meet import Pauses, is_expected, meet
from .work import Work


# The header of each message: tag, bytes, type.
_HEADER = struct.Struct("<qq24s")
# Longest probe, in seconds, for a message that may also come from another sender.
_SLICE = 0.05


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

    # Methods for the thread of a channel.

    # Whether others may receive it as well.
    shared = False

    def is_open(self):
        """Still to be received."""
        return True

    def claim(self, sender):
        """True when it is to be received from ``sender``."""
        return True

    def fail(self, sender, error):
        """It cannot be received from ``sender``."""
        self.complete(error)

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


class FromAny(Message):
    """A receive from any rank: the channels of all senders have it, and the first with a message claims it."""

    shared = True

    def __init__(self, tensor, tag, receiver, senders, timeout):
        super().__init__(tensor, tag)
        self.source = None
        self._receiver, self._timeout = receiver, timeout
        self._senders = set(senders)
        self._end = time.monotonic() + timeout
        self._open = True

    def is_open(self):
        if self._open and time.monotonic() > self._end and self.claim(None):
            senders = sorted(self._senders)
            error = Timeout(
                f"recv: rank {self._receiver} made no progress for {self._timeout} s: no message with tag {self.tag}; not arrived: "
                f"one of ranks {', '.join(map(str, senders))}"
            )
            error.missing = tuple(senders)
            self.complete(error)
        return self._open

    def claim(self, sender):
        with self._lock:
            claimed, self._open = self._open, False
        if claimed:
            self.source = sender
        return claimed

    def fail(self, sender, error):
        """Fails when no sender is left."""
        with self._lock:
            self._senders.discard(sender)
            left = bool(self._senders)
        if self.source == sender or not left and self.claim(None):
            self.complete(error)


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
        self._error = self._aborted = None
        self._closing = False
        # Of the receiver, by tag: what was asked for, and what came before it was.
        self._asked = defaultdict(deque)
        self._aside = defaultdict(deque)
        self._thread = threading.Thread(target=self._serve, name=f"tinynccl-{self._key}", daemon=True)
        self._thread.start()

    def put(self, message):
        self._queue.put(message)
        return message

    def close(self):
        self._queue.put(None)

    def abort(self, reason):
        self._aborted = reason
        if self._comm is not None:
            self._comm.abort(reason)

    def join(self, timeout):
        self._thread.join(timeout)

    def _serve(self):
        serve = self._send if self._sends else self._receive
        while not self._closing and (message := self._queue.get()) is not None:
            try:
                if self._error is not None:
                    raise self._error
                serve(message)
            except Exception as error:
                self._error = error
                message.fail(self._sender, error)
                for asked in self._asked.values():
                    while asked:
                        asked.popleft().fail(self._sender, error)
        if self._comm is not None:
            self._comm.close()

    def _meet(self):
        if self._comm is not None:
            return
        late = f"recv: rank {self._receiver} waits for a first message of rank {self._sender}"
        # Of two ranks: the sender is 0, the receiver 1.
        self._comm = meet(self._store, self._key, int(not self._sends), 2, self._timeout, late, self._stop)
        if self._aborted is not None:
            self._comm.abort(self._aborted)

    def _stop(self):
        if self._aborted is not None:
            raise Aborted(f"recv: rank {self._receiver}: {self._aborted}")

    def _send(self, message):
        self._meet()
        self._comm.send(_header(message), 1)
        self._comm.send(message.data, 1)
        message.complete()

    def _receive(self, message):
        self._ask(message)
        pauses = Pauses()
        while wanted := [one for asked in self._asked.values() for one in asked if one.is_open()]:
            if not all(one.shared for one in wanted):
                self._meet()
                self._take()
            elif self._closing:
                raise Error(f"recv: rank {self._receiver}: the process group is closed")
            elif self._comes(pauses):
                self._take()
            else:
                self._look()
        self._asked.clear()

    def _comes(self, pauses):
        """Whether there is a message. Its absence is no error, as another rank may send it."""
        if self._comm is None:
            self._stop()
            if not is_expected(self._store, self._key):
                pauses.sleep()
                return False
            self._meet()
        return self._comm.probe(0, _SLICE)

    def _look(self):
        """Takes in receives that were posted in the meantime."""
        try:
            while (message := self._queue.get_nowait()) is not None:
                self._ask(message)
            self._closing = True
        except Empty:
            pass

    def _ask(self, message):
        aside = self._aside[message.tag]
        if not aside:
            self._asked[message.tag].append(message)
        elif message.claim(self._sender):
            kind, data = aside.popleft()
            self._fits(message, kind, data.numel())
            message.data.copy_(data)
            message.complete()

    def _take(self):
        """The next message that comes."""
        header = bytearray(_HEADER.size)
        self._comm.recv(header, 0)
        tag, length, kind = _HEADER.unpack(header)
        self._look()
        message = next((one for one in _drain(self._asked[tag]) if one.claim(self._sender)), None)
        if message is None:
            data = torch.empty(length, dtype=torch.uint8)
            self._comm.recv(data, 0)
            self._aside[tag].append((kind, data))
            return
        try:
            self._fits(message, kind, length)
            self._comm.recv(message.data, 0)
        except Exception as error:
            message.fail(self._sender, error)
            raise
        message.complete()

    def _fits(self, message, kind, length):
        if (kind, length) == (_kind(message.tensor), message.data.numel()):
            return
        text = (
            f"recv: rank {self._receiver} and rank {self._sender} disagree: rank {self._receiver} receives {message.data.numel()} bytes of "
            f"{message.tensor.dtype} with tag {message.tag}, rank {self._sender} sent {length} bytes of {kind.rstrip(bytes(1)).decode()}"
        )
        self._comm.abort(text)
        raise Mismatch(text)


def _drain(queue):
    while queue:
        yield queue.popleft()


def _kind(tensor):
    return str(tensor.dtype).encode()[:24].ljust(24, bytes(1))


def _header(message):
    return bytearray(_HEADER.pack(message.tag, message.data.numel(), _kind(message.tensor)))


class Deferred(Work):
    """A message between GPUs: it starts when it is waited for, or with the next call of the group."""

    def _as(self, group, sends, peer):
        (self.tensor,) = self._result
        self._source = group._rank if sends else peer
        self._group, self.sends, self.peer = group, sends, peer
        # The stream that is current when it starts may be another one.
        self.ready = torch.cuda.current_stream(self.tensor.device).record_event()
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
