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
        self.device, self.index = device, device.index
        # For futures, which want a list.
        self.devices = [device]
        self.stream = stream = torch.cuda.Stream(device, priority=-1)
        self.handle = stream.cuda_stream
        if _QUICK:
            self._switch = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}

    def behind_current(self):
        """For calls of the communicator: this stream, behind the current one."""
        return self.handle, current(self.device)

    def completed(self, result):
        """A future of ``result`` that completes after the work in this stream: it records the device's current stream."""
        future = torch._C.Future(self.devices)
        self.as_current(future.set_result, result)
        return future

    def as_current(self, function, *args):
        """Calls ``function`` while the stream is the current one."""
        if not _QUICK:
            with torch.cuda.stream(self.stream):
                return function(*args)
        stream, device, kind = _get(self.index)
        _set(**self._switch)
        try:
            return function(*args)
        finally:
            _set(stream_id=stream, device_index=device, device_type=kind)


class Sides(dict):
    """The stream of each device, made when it is first asked for."""

    def __missing__(self, device):
        # Another thread may have made it in the meantime.
        return self.setdefault(device, Side(device))
