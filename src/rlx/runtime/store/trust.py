"""Native code is never run on faith: objects carry an HMAC under a key that only this user can read.

The key is a file of 32 random bytes with mode 0600, made once, in one atomic step, by whichever process comes
first. Code whose HMAC does not verify is treated as if it were not there, and is made again. A user may
accept code that somebody else signed: that adds an HMAC beside the key and leaves the file as it is.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
from pathlib import Path

from rlx.errors import RlxError, warn
from rlx.files import open_plain, read_plain, replacing
from rlx.system import SYSTEM

KEY_BYTES = 32
MAC_BYTES = 32


class TrustError(RlxError):
    """The key that native code is signed with cannot be relied on."""


class TrustWarning(UserWarning):
    """Signatures work, but only within this process."""


class Keyring:
    """Signs and verifies bytes with one key.

    >>> ring = Keyring(b"k" * 32)
    >>> mac = ring.sign(b"code")
    >>> ring.verify(b"code", mac), ring.verify(b"c0de", mac)
    (True, False)
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise TrustError(
                f"a signing key has {KEY_BYTES} bytes, not {len(key)}; delete the key file to make a new one"
            )
        self._key = key

    def sign(self, data: bytes) -> bytes:
        """The HMAC-SHA256 of `data`."""
        return hmac.digest(self._key, data, "sha256")

    def verify(self, data: bytes, mac: bytes) -> bool:
        """Whether `mac` was made from `data` with this key (compared in constant time)."""
        return hmac.compare_digest(self.sign(data), mac)


def key_path() -> Path:
    """Where the key lies: `rlx/native.key` under the user's configuration directory."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "rlx" / "native.key"


def keyring() -> Keyring:
    """This user's keyring; the key is made on first use.

    Where the key file cannot be made or relied on (read-only home, open to others) a key for this process
    alone is used, with one warning: nothing that was signed before verifies then, which is safe.
    """
    return _keyring_at(key_path())


@functools.lru_cache(maxsize=8)
def _keyring_at(path: Path) -> Keyring:
    try:
        return Keyring(load_or_create(path))
    except (OSError, TrustError) as error:
        reason = (
            str(error) if isinstance(error, TrustError) else f"no signing key at {path}: {error.strerror}"
        )
        warn(f"compiled code serves this process only: {reason}", TrustWarning)
        return Keyring(os.urandom(KEY_BYTES))


def accept(signed: bytes) -> None:
    """Remember that this user trusts what these bytes describe."""
    try:
        _sign_note(_acceptance(signed), signed)
    except OSError as error:
        raise TrustError(f"cannot note in {_notes('trusted')} what is trusted: {error.strerror}") from error


def accepted(signed: bytes) -> bool:
    """Whether this user has accepted these bytes."""
    return _is_signed_note(_acceptance(signed), signed)


def note(file: str, known: bytes) -> None:
    """Remember what is known of a file in the state that `known` describes: one note for each path."""
    try:
        _sign_note(_note_of(file), _VERIFIED + known)
    except OSError:
        pass  # it is found out again


def is_noted(file: str, known: bytes) -> bool:
    """Whether this is noted of a file."""
    return _is_signed_note(_note_of(file), _VERIFIED + known)


_VERIFIED = b"rlx verified\n"  # a note is no acceptance


def _notes(kind: str) -> Path:
    return key_path().parent / kind


def _acceptance(signed: bytes) -> Path:
    return _notes("trusted") / hashlib.sha256(signed).hexdigest()


def _note_of(file: str) -> Path:
    return _notes("verified") / hashlib.sha256(os.path.abspath(file).encode()).hexdigest()


def _sign_note(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as file:  # others who ask meanwhile find what was there before, or this
        file.write(keyring().sign(content))


def _is_signed_note(path: Path, content: bytes) -> bool:
    try:
        return keyring().verify(content, read_plain(path)[: MAC_BYTES + 1])
    except OSError:
        return False


def load_or_create(path: Path) -> bytes:
    """The key in `path`. A missing one is made so that processes that race all end with the same key."""
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(KEY_BYTES))
        # A link appears whole or not at all and never replaces: the first process wins, all read its key.
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
    return _read(path)


def _read(path: Path) -> bytes:
    with open_plain(path, getattr(os, "O_NOFOLLOW", 0)) as file:  # a pipe in its place is not waited for
        status = os.fstat(file.fileno())
        user = SYSTEM.user_id()
        if user is not None and (status.st_uid != user or status.st_mode & 0o077):
            raise TrustError(
                f"the signing key {path} must be a plain file of this user with mode 0600; "
                "delete it, and a new one is made"
            )
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise TrustError(
            f"the signing key {path} has {len(key)} bytes, not {KEY_BYTES}; delete it to make a new one"
        )
    return key
