"""Who may ask: keys, compared in constant time, and hosts, so that no web page reaches a loopback server through the browser."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence

import msgspec

from engine.core.errors import ConfigError, RequestError

MIN_KEY_CHARS = 8
MAX_KEY_CHARS = 512
MAX_KEYS = 1024  # every request is compared with all of them
MAX_SALT_CHARS = 256  # the gateway's bound too
MAX_HOSTS = 256
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_SCHEME = b"bearer "


class Tenant(msgspec.Struct, frozen=True):
    """Who asks. ``key_id`` is for the log, never the key; ``salt`` is the key's own, None where the server has no keys."""

    key_id: str | None = None
    salt: str | None = None

    def namespace(self, cache_salt: str | None) -> str | None:
        """The KV namespace of a request: what one key computed, another never finds, whatever ``cache_salt`` its client chose.

        Raises RequestError for a salt of a length that the gateway would refuse.
        """
        if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_SALT_CHARS:
            raise RequestError(f"cache_salt has {len(cache_salt)} characters; allowed: 1 to {MAX_SALT_CHARS}", param="cache_salt")
        if self.salt is None:
            return cache_salt
        # Two parts of fixed length: no choice of the second can make it look like another first.
        return self.salt + ("" if cache_salt is None else _digest(b"cache salt", cache_salt.encode("utf-8", "surrogatepass")))


NOBODY = Tenant()


class Keys:
    """The keys of a server, as digests. Without any, everybody is let in."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        distinct = list(dict.fromkeys(keys))
        if len(distinct) > MAX_KEYS:
            raise ConfigError(f"{len(distinct)} API keys; allowed: at most {MAX_KEYS}")
        self._entries: list[tuple[bytes, Tenant]] = []
        for key in distinct:
            check_key(key, "--api-key")
            raw = key.encode()
            self._entries.append((hashlib.sha256(raw).digest(), Tenant(_digest(b"key id", raw)[:8], _digest(b"kv salt", raw))))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def tenant(self, authorization: bytes | None) -> Tenant | None:
        """Who an ``Authorization`` header belongs to, None for nobody. Takes as long for a wrong key as for a right one."""
        if not self._entries:
            return NOBODY
        given = authorization or b""
        is_bearer = given[: len(_SCHEME)].lower() == _SCHEME
        digest = hashlib.sha256(given[len(_SCHEME) :].strip()).digest()
        found: Tenant | None = None
        for expected, tenant in self._entries:
            if hmac.compare_digest(expected, digest):
                found = tenant
        return found if is_bearer else None


def check_key(key: str, where: str) -> None:
    """Raise ConfigError for a key that cannot be sent or is easily guessed. The text does not show the key."""
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
        raise ConfigError(f"{where}: a key has {len(key)} characters; needed: {MIN_KEY_CHARS} to {MAX_KEY_CHARS}")
    if not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{where}: a key has characters that a header cannot carry; needed: printable ASCII without spaces")


def parse_key_file(text: str, path: str) -> tuple[str, ...]:
    """Keys of a file: one a line; empty lines and lines that begin with # are skipped. Raises ConfigError naming the line."""
    keys = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        check_key(key, f"--api-key-file {path}, line {number}")
        keys.append(key)
    if not keys:
        raise ConfigError(f"--api-key-file {path}: no key in it; needed: one a line")
    return tuple(keys)


class Hosts:
    """Which Host headers are answered. On a loopback bind only names of this machine are, beside those the operator adds: a web page
    whose name was made to point to 127.0.0.1 (DNS rebinding) still sends its own name.
    """

    def __init__(self, bind_host: str, allowed: Sequence[str] = ()) -> None:
        if len(allowed) > MAX_HOSTS:
            raise ConfigError(f"--allowed-hosts has {len(allowed)} names; allowed: at most {MAX_HOSTS}")
        names = {name.strip().lower().strip("[]") for name in allowed}
        self._names: frozenset[str] | None = None
        if "*" not in names and (names or is_loopback(bind_host)):
            self._names = frozenset(names | LOOPBACK_HOSTS | {bind_host.lower()})

    def allows(self, host: bytes | None, origin: bytes | None) -> bool:
        """``origin`` is what a browser says the page is; a page of another site may not even send."""
        if self._names is None:
            return True
        if host is None or _host_name(host) not in self._names:
            return False
        return origin is None or _host_name(origin.partition(b"://")[2]) in self._names


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(authority: bytes) -> str:
    """The name in ``name:port`` or ``[address]:port``."""
    text = authority.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def _digest(purpose: bytes, data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16, person=purpose).hexdigest()
