"""Server processes: arguments, readiness, crashes, ports, and a tree that never outlives its parent.

A stub process tree stands in for SGLang; tests/integration repeats the essentials with the real one.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatrl.config.engines import ServerConfig
from megatrl.errors import ConfigError, DeadlineError, RolloutError
from megatrl.rollout import server as server_module
from megatrl.rollout.ports import free_port
from megatrl.rollout.server import (
    RolloutServer,
    ServerSpec,
    check_arguments,
    reachable_address,
    server_arguments,
    server_environment,
    sglang_argument_names,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/fakes/fake_sglang_python.py "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def spec(tmp_path: Path, python: str | None = None, **changes: object) -> ServerSpec:
    config = ServerConfig(device="cpu", python=python, start_timeout_s=20.0)
    fields: dict[str, object] = {"model_path": "/m", "config": config, "log_path": tmp_path / "s.log", **changes}
    return ServerSpec(**fields)  # type: ignore[arg-type]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], timeout_s: float = 5.0) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def stub_children(log_path: Path) -> list[int]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for line in log_path.read_text().splitlines() if log_path.exists() else ():
            if line.startswith("children"):
                return [int(pid) for pid in line.split()[1:]]
        time.sleep(0.05)
    raise AssertionError(f"the stub wrote no children to {log_path}")


def test_server_becomes_ready_and_stop_ends_the_whole_tree(tmp_path: Path, fake_python: str) -> None:
    server = RolloutServer(spec(tmp_path, fake_python))
    server.start()
    server.wait_ready()
    server.check()
    children = stub_children(tmp_path / "s.log")
    assert server.is_alive
    assert all(map(is_running, children))
    server.stop()
    assert not server.is_alive
    assert wait_until_gone(children) == []
    server.stop()
    with pytest.raises(RolloutError, match="is not running"):
        server.check()


PARENT = """
import sys, time
from pathlib import Path
from megatrl.config.engines import ServerConfig
from megatrl.rollout.server import RolloutServer, ServerSpec
config = ServerConfig(device="cpu", python=sys.argv[2], start_timeout_s=20.0)
server = RolloutServer(ServerSpec(model_path="/m", config=config, log_path=Path(sys.argv[1])))
server.start()
server.wait_ready()
print("guardian", server._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["parent", "guardian"])
def test_no_process_outlives_a_killed_parent_or_guardian(tmp_path: Path, fake_python: str, victim: str) -> None:
    log = tmp_path / "s.log"
    command = [sys.executable, "-c", PARENT, str(log), fake_python]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed guardian leaves its scratch folder
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    assert parent.stdout is not None
    guardian = int(parent.stdout.readline().split()[1])
    children = stub_children(log)
    stub = int(Path(f"/proc/{children[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent.pid if victim == "parent" else guardian, signal.SIGKILL)
    # SGLang's own children die with it; the stub's do not, so only the stub is asked for after a killed guardian.
    expected = [stub, guardian, *children] if victim == "parent" else [stub]
    left = wait_until_gone(expected)
    parent.kill()
    parent.wait()
    for pid in children:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    assert left == []


def test_start_that_fails_is_reported_with_exit_code_log_and_last_lines(
    tmp_path: Path, fake_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "exit")
    server = RolloutServer(spec(tmp_path, fake_python))
    server.start()
    with pytest.raises(RolloutError, match=rf"exit code 1. Log: {tmp_path}/s.log[\s\S]*no such layer"):
        server.wait_ready()


def test_server_that_never_answers_is_given_up_and_ended(
    tmp_path: Path, fake_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "hang")
    server = RolloutServer(spec(tmp_path, fake_python))
    server.start()
    children = stub_children(tmp_path / "s.log")
    with pytest.raises(DeadlineError, match=r"was not ready after 1 s: still running. Log: .*s\.log"):
        server.wait_ready(1.0)
    assert wait_until_gone(children) == []


def test_port_taken_in_the_meantime_is_changed(
    tmp_path: Path, fake_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([taken := free_port("127.0.0.1"), free_port("127.0.0.1")])
    monkeypatch.setattr(server_module, "free_port", lambda host: next(ports))
    monkeypatch.setenv("FAKE_SGLANG", f"taken:{taken}")
    server = RolloutServer(spec(tmp_path, fake_python))
    server.start()
    assert server.url.endswith(f":{taken}")
    server.wait_ready()
    assert not server.url.endswith(f":{taken}")
    server.stop()


def test_given_port_that_is_taken_is_an_error(
    tmp_path: Path, fake_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port("127.0.0.1")
    monkeypatch.setenv("FAKE_SGLANG", f"taken:{port}")
    server = RolloutServer(spec(tmp_path, fake_python, port=port))
    server.start()
    with pytest.raises(RolloutError, match="Address already in use"):
        server.wait_ready()


def test_arguments_carry_the_configuration_and_the_version(tmp_path: Path) -> None:
    config = ServerConfig(device="cpu", precision="fp32", tensor=2, max_total_tokens=99, sglang={"log_level": "info"})
    arguments = server_arguments(spec(tmp_path, config=config, policy_version=7, context_length=512, seed=3), 5000)
    assert arguments["host"] == "127.0.0.1"
    assert (arguments["port"], arguments["tp_size"], arguments["dtype"]) == (5000, 2, "float32")
    assert (arguments["weight_version"], arguments["context_length"], arguments["random_seed"]) == ("7", 512, 3)
    assert (arguments["max_total_tokens"], arguments["log_level"]) == (99, "info")
    assert arguments["attention_backend"] == "torch_native"
    cuda = server_arguments(spec(tmp_path, config=ServerConfig()), 5000)
    assert "attention_backend" not in cuda
    assert "max_total_tokens" not in cuda
    assert cuda["dtype"] == "bfloat16"
    json.dumps(arguments)


def test_environment_is_offline_and_single_threaded_on_a_cpu(tmp_path: Path) -> None:
    config = ServerConfig(device="cpu", tensor=2)
    environment = server_environment(spec(tmp_path, config=config, environment={"X": "1"}))
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert len(environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert environment["X"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in server_environment(spec(tmp_path, config=ServerConfig()))


def test_arguments_we_own_and_arguments_sglang_lacks_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        check_arguments(ServerConfig(sglang={"port": 1, "chunked_prefil_size": 2, "log_level": "info"}))
    assert "rollout.servers.sglang.port is set by the launcher" in caught.value.message
    assert "log_level" not in caught.value.message
    if sglang_argument_names():
        assert "chunked_prefil_size is not an argument of the installed SGLang" in caught.value.message


def test_argument_names_are_read_from_the_installed_sources() -> None:
    names = sglang_argument_names()
    assert {"model_path", "chunked_prefill_size", "enable_deterministic_inference", "attention_backend"} <= names
    assert "sglang" not in sys.modules


def test_argument_names_of_an_older_release_come_from_its_class(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "srt" / "server_args.py").write_text("class ServerArgs:\n    model_path: str\n    port: int = 1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    assert sglang_argument_names(str(python)) == {"model_path", "port"}


def test_interpreter_without_sglang_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: no site-packages
    python.chmod(0o700)
    with pytest.raises(RolloutError, match="SGLang is not installed for"):
        check_arguments(ServerConfig(python=str(python)))


def test_address_of_a_server_bound_everywhere_is_the_nodes_own() -> None:
    assert reachable_address("10.1.2.3") == "10.1.2.3"
    assert reachable_address("0.0.0.0") != "0.0.0.0"
