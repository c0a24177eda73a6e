"""Which ops make the host wait on a backend: the backend's own claim."""

from __future__ import annotations

# Ops that a device computes only with a kernel written for them; elsewhere the host steps in.
_NEED_A_KERNEL = frozenset({"custom", "log_mel", "log_mel_backward", "welch_peaks"})
_CLAIMS: dict[str, frozenset[str]] = {"cpu": frozenset({"log_mel", "log_mel_backward", "welch_peaks"})}


def claim_native(backend: str, kinds: frozenset[str]) -> None:
    """A backend says for which of these ops it has kernels of its own.

    >>> claim_native("demo", frozenset({"log_mel"}))
    >>> sorted(host_sync_op_kinds("demo"))
    ['custom', 'log_mel_backward', 'welch_peaks']
    """
    _CLAIMS[backend] = kinds


def host_sync_op_kinds(backend: str) -> frozenset[str]:
    """Names of ops for which the host must wait on a backend.

    >>> sorted(host_sync_op_kinds("one that claims nothing"))
    ['custom', 'log_mel', 'log_mel_backward', 'welch_peaks']
    """
    return _NEED_A_KERNEL - _CLAIMS.get(backend, frozenset())
