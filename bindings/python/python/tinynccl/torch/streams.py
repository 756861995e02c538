"""Streams of torch, without the detours of ``torch.cuda``: a call of a few microseconds cannot spend ten on its stream."""

import torch

# Of torch 2.
_raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_get = getattr(torch._C, "_cuda_getCurrentStream", None)
_set = getattr(torch._C, "_cuda_setStream", None)
_QUICK = torch.__version__ >= "2" and None not in (_raw, _get, _set)


def current(device):
    """The handle of the current stream."""
    return _raw(device.index) if _QUICK else torch.cuda.current_stream(device).cuda_stream


class Side:
    """The stream of a group's calls on a device."""

    def __init__(self, device):
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.handle = self.stream.cuda_stream

    def as_current(self, function, *args):
        """Calls ``function`` while the stream is the current one."""
        if not _QUICK:
            with torch.cuda.stream(self.stream):
                return function(*args)
        before = _get(self.device.index)
        _switch(self.stream.stream_id, self.stream.device_index, self.stream.device_type)
        try:
            return function(*args)
        finally:
            _switch(*before)


def _switch(stream, device, kind):
    _set(stream_id=stream, device_index=device, device_type=kind)
