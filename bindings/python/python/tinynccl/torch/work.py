"""Calls in flight, as ``torch.distributed`` sees them."""

import datetime
import threading

import torch
from torch._C import _distributed_c10d as c10d

from .streams import current

# Calls in flight whose end no one has asked for yet.
_KEPT = 256


class _Future(torch.futures.Future):
    """A future of a call on the CPU. A thread that waits for it runs a still-queued call itself."""

    call = None

    def wait(self):
        if self.call is not None and not self.done():
            self.call.wait()
        return super().wait()


class Work(c10d.Work):
    """A call in flight, as ``torch.distributed`` sees it. ``wait`` raises the call's error."""

    # Of the class while an object has nothing else, and no `__init__`: calls are made often.
    _call = _result = _kept = _finish = _lock = _gpu_end = _side = _source = _future = None

    @classmethod
    def of(cls, call, result, kept, end=None, side=None):
        """Of ``call``, a ``tinynccl.Work`` or an object with its methods (none: it is complete), or of calls on a GPU, which
        are complete when the stream of ``side`` has passed ``end``. torch 1.13 forgets the Python half of an object that
        only C++ holds. So the object stays in ``kept`` until its end was asked for, or many others have followed it."""
        work = cls()
        work._call = call
        work._result = result
        if side is not None:
            work._gpu_end = end
            work._side = side
        work._kept = kept
        kept[id(work)] = work
        if len(kept) > _KEPT:
            kept.pop(next(iter(kept)), None)
        return work

    def _then(self, finish):
        """``finish`` runs once, after the call and before its end is reported."""
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
        if self._gpu_end is not None:
            # The current stream waits; the host does not.
            self._gpu_end.before(current(self._side.device))
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
        done, error = self._on_gpu()
        if not done:
            return False
        if self._call is not None:
            error = self._call.exception()
        if error is None:
            self._end()
        return True

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        return self._on_gpu()[1] if self._call is None else self._call.exception()

    def _on_gpu(self):
        """Whether the GPU has done its part, and the error with which it ended."""
        if self._gpu_end is None:
            return True, None
        try:
            return self._gpu_end.query(), None
        except Exception as error:
            return True, error

    def result(self):
        self.wait()
        return self._result

    def source_rank(self):
        # A receive from any rank knows it when it is over.
        return getattr(self._call, "source", self._source)

    _source_rank = source_rank

    def get_future(self):
        if self._future is None:
            if self._side is not None:
                self._future = self._side.completed(self._result)
            else:
                self._future = _Future()
                self._complete(self._future)
        self._release()
        return self._future

    def _complete(self, future):
        if self._call is None:
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

