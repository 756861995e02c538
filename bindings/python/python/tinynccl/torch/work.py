"""Calls in flight, as ``torch.distributed`` sees them."""

import datetime
import threading

import torch
from torch._C import _distributed_c10d as c10d

# Calls in flight that nobody has asked for yet.
_KEPT = 256


class _Future(torch.futures.Future):
    """Of a call on the CPU. Who waits for it carries the call out, if nobody has begun it."""

    call = None

    def wait(self):
        if self.call is not None and not self.done():
            self.call.wait()
        return super().wait()


class Work(c10d.Work):
    """A call in flight, as ``torch.distributed`` sees it. ``wait`` raises what the call failed with."""

    # Of the class while an object has nothing else, and no `__init__`: calls are made often.
    _call = _result = _kept = _finish = _lock = _event = _source = _future = None
    _devices = ()

    @classmethod
    def of(cls, call, result, kept):
        """Of ``call``, a ``tinynccl.Work`` or what has its methods (none: it is complete). torch 1.13 forgets the Python half of an
        object that only C++ holds: it stays in ``kept`` until somebody has asked for its end, or many have come after it."""
        work = cls()
        work._call = call
        work._result = result
        work._kept = kept
        kept[id(work)] = work
        if len(kept) > _KEPT:
            kept.pop(next(iter(kept)), None)
        return work

    def _on(self, event, device):
        """It has ended when the stream has passed ``event``."""
        self._event = event
        self._devices = (device,)
        return self

    def _then(self, finish):
        """``finish`` is called once, after the call and before anybody is told of its end."""
        self._finish = finish
        self._lock = threading.Lock()
        return self

    def _release(self):
        if self._kept is not None:
            self._kept.pop(id(self), None)
            self._kept = None

    def wait(self, timeout=None):
        self._release()
        if self._call is not None:
            # torch's own default is a timeout of zero: none.
            self._call.wait(_seconds(timeout) if timeout else None)
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
        if self._call is not None and not self._call.is_completed():
            return False
        if self._event is not None and not self._event.query():
            return False
        if self.exception() is None:
            self._end()
        return True

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        return None if self._call is None else self._call.exception()

    def result(self):
        self.wait()
        return self._result

    def source_rank(self):
        # A receive from any rank knows it when it is over.
        return getattr(self._call, "source", self._source)

    _source_rank = source_rank

    def get_future(self):
        if self._future is None:
            self._future = torch.futures.Future(devices=list(self._devices)) if self._devices else _Future()
            self._complete(self._future)
        self._release()
        return self._future

    def _complete(self, future):
        if self._event is not None:
            # It is the stream that completes: the future records it.
            self._event.side.as_current(future.set_result, self._result)
        elif self._call is None:
            self._end()
            future.set_result(self._result)
        elif self._lock is None:
            future.call = self._call
            self._call.complete_future(future, self._result)
        else:
            future.call = self._call
            self._call.add_done_callback(self._done)

    def _done(self):
        """Of a call with something left to do."""
        error = self.exception()
        if error is None:
            try:
                self._end()
            except Exception as failure:
                error = failure
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)


def _seconds(timeout):
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout


class Event:
    """The end of calls on a communication stream."""

    def __init__(self, side, comm):
        self.side = side
        self._comm = comm
        self._event = torch.cuda.Event()
        self._event.record(side.stream)

    def wait(self):
        """The current stream waits; the host does not."""
        self._comm.check()
        torch.cuda.current_stream(self.side.device).wait_event(self._event)

    def query(self):
        return self._event.query()
