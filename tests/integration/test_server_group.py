"""Rollout servers under Ray: a killed server, or its killed host, comes back under a new host until no restart is left.

A stub stands in for SGLang; tests/integration/test_several_servers.py restarts the real one.
"""

import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from megatrl.errors import RolloutError
from megatrl.orchestration.placement import ray_cluster
from megatrl.orchestration.servers import ServerGroup
from tests.integration.test_worker_group import recipe

ROOT = Path(__file__).parents[2]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ends(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"{[pid for pid in pids if is_running(pid)]} are left of the killed server"
        time.sleep(0.05)


def process_tree(log: Path) -> tuple[int, int, list[int]]:
    """Host, server and the server's children of the latest start."""
    (*_, line) = (line for line in log.read_text().splitlines() if line.startswith("children"))
    children = [int(pid) for pid in line.split()[1:]]
    server = parent_of(children[0])
    return parent_of(parent_of(server)), server, children


def test_a_killed_server_or_host_is_replaced_until_no_restart_is_left(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/fakes/fake_sglang_python.py "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    servers = {"device": "cpu", "python": str(python), "start_timeout_s": 60.0, "max_restarts": 2}
    config = recipe(actor={"device": "cpu"}, rollout={"servers": servers})
    log = tmp_path / "logs" / "server-0.log"
    with ray_cluster(config) as placement:
        group = ServerGroup.start(config, tmp_path / "model", placement, log.parent)
        try:
            seen = list(group.wait_ready())
            for victim in ("server", "host"):
                host, server, children = process_tree(log)
                os.kill(server if victim == "server" else host, signal.SIGKILL)
                assert group.notice(), f"the killed {victim} was not noticed"
                assert group.urls == ()
                assert_ends([server, *children])
                (url,) = group.wait_reachable()
                assert url not in seen
                assert process_tree(log)[0] != host, "the new server has a host of its own"
                assert group.urls == (), "it holds old weights"
                assert group.take_note([url], {}) == set()
                assert group.urls == (url,)
                seen.append(url)
            _, server, children = process_tree(log)
            os.kill(server, signal.SIGKILL)
            with pytest.raises(RolloutError) as caught:
                group.notice()
            assert "rollout server 0 is gone and no restart is left" in caught.value.message
            assert "max_restarts=2" in caught.value.message
            assert f"exit code 137. Log: {log}" in caught.value.message
            assert_ends([server, *children])
        finally:
            group.stop()
