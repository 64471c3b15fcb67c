"""Ports for process groups come from below the ephemeral range and are free."""

import socket
from pathlib import Path

import pytest

from megatrl.errors import MegatrlError
from megatrl.orchestration import ports


def test_a_port_lies_below_the_ephemeral_range_and_can_be_bound():
    lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(50):
        port = ports.free_port()
        assert port < lowest_ephemeral
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_in_use_is_not_given(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used = taken.getsockname()[1]

        class Same:
            def randrange(self, low: int, high: int) -> int:
                return used

        monkeypatch.setattr(ports.random, "SystemRandom", Same)
        with pytest.raises(MegatrlError, match="no free port"):
            ports.free_port()
