"""Ports for servers and process groups come from below the ephemeral range, are free, and are given once."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatrl.errors import MegatrlError
from megatrl.rollout import ports


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


def test_ports_are_given_out_once_even_in_parallel():
    with ThreadPoolExecutor(16) as pool:
        given = list(pool.map(lambda _: ports.free_port(), range(320)))
    assert len(set(given)) == 320


def test_an_address_of_another_machine_is_named():
    with pytest.raises(MegatrlError, match=r"192\.0\.2\.1 is not an address of this machine"):
        ports.free_port("192.0.2.1")
