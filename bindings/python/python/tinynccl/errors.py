"""Exceptions. The text names the operation, the ranks, the expected and the received value, and the next step."""


class Error(RuntimeError):
    """Base of all others. Where known: ``op``, ``rank`` (ours), ``peer``, ``missing`` (ranks that did not arrive)."""

    op = None
    rank = None
    peer = None
    missing = ()


class Mismatch(Error):
    """Two ranks made different calls."""


class PeerLost(Error):
    """A peer's process or connection is gone."""


class Timeout(Error, TimeoutError):
    """No progress until the deadline."""


class Aborted(Error):
    """The communicator was aborted, here or by another rank, or failed in an earlier call."""


class InvalidArgument(Error, ValueError):
    """Arguments that cannot be right; nothing was sent."""


class ConfigError(Error, ValueError):
    """An environment variable is missing or does not parse."""


class BootstrapError(Error):
    """The ranks could not find each other."""


class ProtocolError(Error):
    """Bytes from a peer violate the protocol."""


class CorruptError(Error):
    """Bits changed in memory or on a link, found by `TINYNCCL_VERIFY`."""


class SystemFailure(Error):
    """The operating system refused something."""


class CudaError(Error):
    """The CUDA driver refused something."""


class Unsupported(Error):
    """This build or this machine cannot do it."""
