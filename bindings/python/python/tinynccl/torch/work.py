"""Calls in flight, as ``torch.distributed`` sees them."""

import datetime
import itertools
import threading

import torch
from torch._C import _distributed_c10d as c10d

# Calls in flight that nobody has asked for yet.
_KEPT = 256


class _Future(torch.futures.Future):
    """Of a call on the CPU. Who waits for it carries the call out: a callback of another future that waits runs in the very thread
    which would do that otherwise."""

    work = None

    def wait(self):
        if self.work is not None and not self.done():
            self.work.wait()
        return super().wait()


class Work(c10d.Work):
    """A call in flight, as ``torch.distributed`` sees it. ``wait`` raises what the call failed with."""

    # Of the class while an object has nothing else: calls are made often.
    _kept = _finish = _lock = _event = _source = _future = None
    _devices = ()

    def __init__(self, works, result):
        c10d.Work.__init__(self)
        self._works = works
        self._result = result

    @classmethod
    def on_stream(cls, result, event, device):
        """Of calls that are behind ``event``."""
        work = cls((), result)
        work._event = event
        work._devices = (device,)
        return work

    def _then(self, finish):
        """``finish`` is called once, after the calls and before anybody is told of their end."""
        self._finish = finish
        self._lock = threading.Lock()
        return self

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
        # torch's own default is a timeout of zero: none.
        seconds = timeout.total_seconds() or None if isinstance(timeout, datetime.timedelta) else timeout
        for work in self._works:
            work.wait(seconds)
        self._end()
        if self._event is not None:
            self._event.wait()
        return True

    def _end(self):
        if self._lock is None:
            return
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
            self._future = torch.futures.Future(devices=list(self._devices)) if self._devices else _Future()
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
            self._future.work = None
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
            return
        self._future.work = self
        for work in self._works:
            work.add_done_callback(one_done)


class Event:
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
