"""Calls in flight, as ``torch.distributed`` sees them."""

import datetime
import sys
import threading

import torch
from torch._C import _distributed_c10d as c10d

from .streams import current

# Calls whose end no one has asked for yet.
_KEPT = 256
# Newest ones among them: torch's C++ may be about to take them.
_NEW = 4
# Longest time-out that Python's own waits take, in seconds.
_LONGEST = threading.TIMEOUT_MAX


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
        kept.add(work)
        return work

    def _then(self, finish):
        """``finish`` runs once, after the call and before its end is reported."""
        self._finish = finish
        # A signal's handler may wait for the same call as its thread does.
        self._lock = threading.RLock()
        return self

    def _release(self):
        if self._kept is not None:
            self._kept.discard(self)
            self._kept = None

    def wait(self, timeout=None):
        kept = self._kept
        self._release()
        if self._call is not None:
            # torch's own default is a timeout of zero: none.
            self._call.wait(min(seconds(timeout), _LONGEST) if timeout else None)
        self._end()
        if self._gpu_end is not None:
            # The current stream waits; the host does not.
            self._gpu_end.before(current(self._side.device))
        if kept is not None:
            kept.sweep()
        return True

    def _end(self):
        if self._lock is None:
            return
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                # Also into leaves of a graph, and in a thread of ours into tensors made in inference mode.
                with torch.inference_mode():
                    finish()

    def synchronize(self):
        self.wait()

    def _is_over(self):
        """As `is_completed`, of a work that nobody may ask any more; what was left to do is done."""
        if self._call is not None and not self._call.is_completed() or not self._on_gpu()[0]:
            return False
        if self._lock is not None and self.exception() is None:
            self._end()
        return True

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
        if self._kept is not None:
            self._kept.sweep()
        return True

    def _forget(self):
        """Lets go of memory: it is over, and nobody but torch's C++ can ask for more than that."""
        if self._call is None or self._call.exception() is None:
            self._call = self._result = self._finish = None

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
                future = torch.futures.Future()
                self._complete(future)
                # An exception that Python sets is a result for C++: DDP would look for gradients in it, and crash. Raised in
                # a callback it is an error for both.
                self._future = future.then(torch.futures.Future.value)
        self._release()
        return self._future

    def _complete(self, future):
        if self._call is None:
            self._end()
            future.set_result(self._result)
        elif self._lock is None:
            self._call.complete_future(future, self._result)
        else:
            self._call.add_done_callback(lambda: self._done(future))

    def _done(self, future):
        """Completes the future of a call with something left to do."""
        error = self.exception()
        if error is None:
            try:
                self._end()
            except Exception as failure:
                error = failure
        if error is None:
            future.set_result(self._result)
        else:
            future.set_exception(error)


class Kept:
    """Works that a group has handed out. torch 1.13 forgets the Python half of an object that only C++ holds, so they stay here
    until their end was asked for, or many others have followed. Once they are over, they hold no memory."""

    def __init__(self):
        self._works = {}
        # Those that may hold memory, oldest first.
        self._full = {}
        self._lock = threading.RLock()

    def add(self, work):
        with self._lock:
            self._works[id(work)] = self._full[id(work)] = work
            if len(self._works) > _KEPT:
                self._remove(next(iter(self._works)))
            self.sweep()

    def discard(self, work):
        with self._lock:
            self._remove(id(work))

    def _remove(self, key):
        self._works.pop(key, None)
        self._full.pop(key, None)

    def sweep(self):
        """Looks at the oldest ones."""
        if len(self._full) <= _NEW:
            return
        with self._lock:
            while len(self._full) > _NEW:
                key = next(iter(self._full))
                work = self._full[key]
                if sys.getrefcount(work) > _OURS:
                    # Python's callers have it, and so it lives without us.
                    self._remove(key)
                elif work._is_over():
                    self._full.pop(key)
                    work._forget()
                else:
                    return


# References to a work in `sweep` that are ours: of two dictionaries, a variable and an argument.
_OURS = 4


def seconds(timeout):
    """A time-out, a ``timedelta`` or a number, in seconds."""
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout

