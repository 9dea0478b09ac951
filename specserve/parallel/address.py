"""Where an engine listens, as options and people write it: HOST:PORT."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from specserve.errors import ConfigError, shown

_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_MOST_CHARACTERS = 253  # of a name in DNS


@dataclass(frozen=True, slots=True)
class Address:
    """`host` is a name or an IP address without brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, option: str) -> Address:
        """From "host:port", an IPv6 address in brackets. Raises ConfigError, which names the option."""
        host, _, port = text.strip().rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        is_host = len(bare) <= _MOST_CHARACTERS and (bare == host or ":" in bare)
        is_host = is_host and (_HOST.fullmatch(bare) is not None if bare == host else _is_ip(bare))
        if not is_host or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
            raise ConfigError(
                f"{option} is {shown(text)}; it must be HOST:PORT, such as 10.0.0.2:7000, [fd00::2]:7000 or "
                "engine-1.example:7000, with a port up to 65535."
            )
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine can be there. Of names only localhost is known to be."""
        return ipaddress.ip_address(self.host).is_loopback if _is_ip(self.host) else self.host == "localhost"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
