"""Messages: each pair of ranks and direction has a communicator and a thread of its own; on GPUs they go together."""

import atexit
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from queue import Empty, SimpleQueue

import torch

from ..errors import Aborted, Error, Mismatch, PeerLost, Timeout
from .meet import Meeting, Pauses
from .work import Work


# The header of each message: tag, bytes, type.
_HEADER = struct.Struct("<qq24s")
# Longest probe, in seconds, for a message that may also come from another sender.
_SLICE = 0.05
# Longest wait of a group's end for messages that are being sent, and for threads that were told to end.
_LAST, _LEAVES = 10.0, 2.0
# All of this process whose threads may run.
_channels = weakref.WeakSet()


class Message:
    """A message in flight: what ``tinynccl.Work`` is for a call, of one that a thread of ours completes."""

    # The sender of a receive from any rank.
    source = None

    def __init__(self, memory, tensor, tag):
        self.tensor, self.tag = tensor, tag
        (one,) = [*memory.reads, *memory.writes]
        # What goes over the wire: the receiver may have to take it before it knows which type it wants.
        self.data = one.detach().as_strided((one.numel(),), (1,)).view(torch.uint8)
        self._finish = memory.then(None)
        self._done = threading.Event()
        self._lock = threading.RLock()
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
        if error is None and self._finish is not None:
            with torch.inference_mode():
                self._finish()
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

    def is_awaited(self, sender):
        """Whether something of ``sender`` may still be received into it."""
        return not self.is_completed() and (self.is_open() or self.source == sender)

    def claim(self, sender):
        """True when it is to be received from ``sender``."""
        return True

    def fail(self, sender, error):
        """It cannot be received from ``sender``."""
        self.complete(error)

    def wait(self, timeout=None):
        if not self._done.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
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

    def __init__(self, memory, tensor, tag, receiver, senders, timeout):
        """``receiver`` is a name in errors, ``senders`` has those of the ranks that may send."""
        super().__init__(memory, tensor, tag)
        self._receiver, self._timeout = receiver, timeout
        self._senders = dict(senders)
        self._end = time.monotonic() + timeout
        self._open = True

    def is_open(self):
        if self._open and time.monotonic() > self._end and self.claim(None):
            senders = sorted(self._senders.values())
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
            self._senders.pop(sender, None)
            left = bool(self._senders)
        if self.source == sender or not left and self.claim(None):
            self.complete(error)


class Channel:
    """Messages from one rank to another, in a thread of their own: a message never waits for one of another pair or of the
    other direction. The first one makes a communicator of the two ranks. Messages of one tag arrive in order; one whose tag
    nobody has asked for yet is put aside."""

    def __init__(self, store, group, timeout, sends, pair, names):
        """``group`` is the communicator of the process group, ``pair`` has the ranks of sender and receiver in it, ``names``
        their numbers in errors."""
        self._group, self._sends = group, sends
        self._sender, self._receiver = pair
        self._names, self._timeout = list(names), timeout
        self._meeting = Meeting(store, f"message-{self._sender}-{self._receiver}", timeout, self._watch)
        self._queue = SimpleQueue()
        self._comm = None
        # The error of all that follows; the reason why waits are to end.
        self._error = self._ended = None
        self._closing = False
        # What was put and is not complete.
        self._open = weakref.WeakSet()
        # Of the receiver, by tag: what was asked for, and what came before it was.
        self._asked = defaultdict(deque)
        self._aside = defaultdict(deque)
        _channels.add(self)
        self._thread = threading.Thread(target=self._serve, name=f"tinynccl-message-{self._sender}-{self._receiver}", daemon=True)
        self._thread.start()

    def put(self, message):
        self._open.add(message)
        self._queue.put(message)
        if self._closing:
            # The thread may not see it any more.
            self._fail(message, Error(self._closed()))
        return message

    def close(self):
        """No more messages. Those to be sent are sent; receives end."""
        self._closing = True
        self._queue.put(None)
        if not self._sends:
            # With nothing to receive, the peer's last message is not disturbed.
            awaited = any(one.is_awaited(self._sender) for one in list(self._open))
            self._end(Error(self._closed()), awaited)

    def _closed(self):
        call, rank = ("send", self._names[0]) if self._sends else ("recv", self._names[1])
        return f"{call}: rank {rank}: the process group is closed"

    def abort(self, reason):
        call, rank = ("send", self._names[0]) if self._sends else ("recv", self._names[1])
        self._end(Aborted(f"{call}: rank {rank}: {reason}"))

    def _end(self, error, now=True):
        """Ends the thread's waits with ``error``: for the peer, and with ``now`` in a call of the two ranks."""
        self._ended = self._ended or error
        comm = self._comm
        if comm is not None and now and not comm.closed:
            comm.abort(str(error))

    def join(self, timeout):
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def is_over(self):
        return not self._thread.is_alive()

    def _serve(self):
        serve = self._send if self._sends else self._receive
        while (message := self._next()) is not None:
            try:
                if self._error is not None:
                    raise self._error
                if self._ended is not None:
                    raise self._ended
                serve(message)
            except Exception as error:
                self._error = error = self._ended or error
                self._fail(message, error)
                for asked in self._asked.values():
                    while asked:
                        self._fail(asked.popleft(), error)
        if self._comm is not None:
            self._comm.close()

    def _next(self):
        """The next message; None: there will be no more."""
        try:
            return self._queue.get(block=not self._closing)
        except Empty:
            return None

    def _complete(self, message):
        # Before the one who waits for it can close us.
        self._open.discard(message)
        message.complete()

    def _fail(self, message, error):
        self._open.discard(message)
        message.fail(self._sender, error)

    def _meet(self):
        if self._comm is not None:
            return
        late = f"recv: rank {self._names[1]} waits for a first message of rank {self._names[0]}"
        # Of two ranks: the sender is 0, the receiver 1.
        self._comm, _ = self._meeting.join(int(not self._sends), 2, late, self._names)
        self._watch()

    def _watch(self):
        """Raises once the peer cannot be met any more."""
        if self._ended is not None:
            raise self._ended
        if self._comm is not None:
            return
        self._group.check()
        peer = self._receiver if self._sends else self._sender
        if self._group.has_left(peer):
            us, other = self._names if self._sends else self._names[::-1]
            call = "send" if self._sends else "recv"
            error = PeerLost(f"{call}: rank {us} lost rank {other}: it closed its communicator and left")
            error.op, error.rank, error.peer = call, us, other
            raise error

    def _send(self, message):
        self._meet()
        self._comm.send(_header(message), 1)
        self._comm.send(message.data, 1)
        self._complete(message)

    def _receive(self, message):
        self._ask(message)
        pauses = Pauses()
        # One that another rank's channel has claimed is no longer ours.
        while wanted := [one for asked in self._asked.values() for one in asked if one.is_open()]:
            if not all(one.shared for one in wanted):
                self._meet()
                self._take()
            elif self._closing:
                raise self._ended or Error(self._closed())
            elif self._comes(pauses):
                self._take()
            else:
                self._look()
        self._asked.clear()

    def _comes(self, pauses):
        """Whether there is a message. Its absence is no error, as another rank may send it."""
        if self._comm is None:
            if not self._meeting.is_offered(1):
                self._watch()
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
            self._complete(message)

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
            self._fail(message, self._ended or error)
            raise
        self._complete(message)

    def _fits(self, message, kind, length):
        if (kind, length) == (_kind(message.tensor), message.data.numel()):
            return

        def text(sender, receiver):
            return (
                f"recv: rank {receiver} and rank {sender} disagree: rank {receiver} receives {message.data.numel()} bytes of "
                f"{message.tensor.dtype} with tag {message.tag}, rank {sender} sent {length} bytes of {kind.rstrip(bytes(1)).decode()}"
            )

        # The peer gives the ranks of our communicator their names.
        self._comm.abort(text(0, 1))
        error = Mismatch(text(*self._names))
        error.peer, error.rank = self._names
        raise error


def close_channels(channels, timeout=_LAST):
    """Ends their threads, at once for what is received and after a while for what is sent."""
    for channel in channels:
        channel.close()
    for limit in (min(timeout, _LAST), _LEAVES):
        end = time.monotonic() + limit
        for channel in channels:
            channel.join(max(0.0, end - time.monotonic()))
        channels = [channel for channel in channels if not channel.is_over()]
        for channel in channels:
            channel.abort("the process group is closed")


@atexit.register
def _at_exit():
    """A thread that comes back into an interpreter that has ended brings the process down."""
    close_channels([channel for channel in list(_channels) if not channel.is_over()])


def _drain(queue):
    while queue:
        yield queue.popleft()


def _kind(tensor):
    return str(tensor.dtype).encode()[:24].ljust(24, bytes(1))


def _header(message):
    return bytearray(_HEADER.pack(message.tag, message.data.numel(), _kind(message.tensor)))


class Deferred(Work):
    """A message between GPUs: it starts when it is waited for, or with the next call of the group."""

    def _as(self, group, plain, sends, peer):
        (self.tensor,) = self._result
        (self.memory,) = [*plain.reads, *plain.writes]
        self.finish = plain.then(None)
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
