"""Ports that stay free between choosing and use: below the range the kernel hands out by itself."""

import errno
import random
import socket
import threading
from pathlib import Path

from megatrl.errors import MegatrlError

_LOWEST = 15_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()
_lock = threading.Lock()


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port that nobody listens on and that no outgoing connection or `port 0` will take meanwhile.

    Seconds pass before a server or a process group listens on its port, while gloo pairs and clients open
    hundreds of ephemeral ports on the same host. One process is never given a port twice. Raises MegatrlError
    where `host` is not an address of this machine and where 200 draws find none.
    """
    ephemeral = int(_RANGE.read_text().split()[0]) if _RANGE.is_file() else 32_768
    draw = random.SystemRandom()
    for _ in range(200):
        port = draw.randrange(_LOWEST, max(ephemeral, _LOWEST + 1_000))
        with _lock:
            if port in _given:
                continue
            with socket.socket() as probe:
                try:
                    probe.bind((host, port))
                except OSError as error:
                    if error.errno == errno.EADDRNOTAVAIL:
                        raise MegatrlError(
                            f"{host} is not an address of this machine; others are to reach it there"
                        ) from error
                    continue
            _given.add(port)
            return port
    raise MegatrlError(f"no free port between {_LOWEST} and {ephemeral} on {host} in 200 draws; end leftover processes")
