"""RolloutServer: one SGLang HTTP server as a child process that never outlives its parent."""

import ast
import functools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatrl.config.engine_checks import OWNED_SGLANG_ARGUMENTS
from megatrl.config.engines import ServerConfig
from megatrl.errors import ConfigError, DeadlineError, RolloutError
from megatrl.mcore.weights_directory import is_weights_directory
from megatrl.rollout.control import ServerControl
from megatrl.rollout.ports import free_port

logger = logging.getLogger(__name__)

_LAUNCH = Path(__file__).parent / "sglang_cpu" / "launch.py"
_GUARDIAN = Path(__file__).parent / "guardian.py"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_CPU_DEFAULTS = {
    "attention_backend": "torch_native",
    "sleep_on_idle": True,  # an idle scheduler otherwise keeps one core busy
    "enable_deterministic_inference": True,  # the only mode in which a request's seed is used
    "disable_overlap_schedule": True,  # there is no device to overlap with; saves a fifth of the scheduler's time
}
_CPU_TOTAL_TOKENS = 262_144
_PORT_ATTEMPTS = 3
_POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """Everything one server process needs to start."""

    model_path: str
    config: ServerConfig
    log_path: Path
    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one
    context_length: int | None = None  # tokens; None means the model's own limit
    policy_version: int = 0
    seed: int = 0
    record_routing: bool = False
    """Keep each token's expert choices for requests that ask; a mixture model only."""
    constrains: bool = False
    """Keep the tokenizer in the server, so that requests may ask for text that matches a pattern."""
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Added to the process environment, e.g. CUDA_VISIBLE_DEVICES."""


class RolloutServer:
    """One SGLang server. `start`, `wait_ready`, then `check` between uses, then `stop`.

    The process tree ends within seconds of its parent, even when the parent is killed.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._port = spec.port
        self._starts = 0
        self._log_start = 0

    @property
    def url(self) -> str:
        """Base URL, as other nodes reach it; the port is known after `start`."""
        return f"http://{reachable_address(self.spec.host)}:{self._port}"

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and return at once. Raises ConfigError for arguments SGLang does not have."""
        if self.is_alive:
            raise RolloutError(f"server {self.url} is already running; stop it before starting it again")
        check_arguments(self.spec.config)
        self._port = self.spec.port or free_port(self.spec.host)
        self._starts += 1
        config, log_path = self.spec.config, self.spec.log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        server = [config.python or sys.executable, str(_LAUNCH), json.dumps(server_arguments(self.spec, self._port))]
        guardian = [sys.executable, "-S", str(_GUARDIAN), str(os.getpid()), *server]
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                guardian,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(self.spec),
                start_new_session=True,
            )
        logger.info("server starting url=%s pid=%d log=%s", self.url, self._process.pid, log_path)

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return once the server has generated a token.

        Raises RolloutError where it exits first, DeadlineError after `config.start_timeout_s`. A
        port that someone else took in the meantime is changed and the server started again.
        """
        timeout_s = timeout_s or self.spec.config.start_timeout_s
        deadline = time.monotonic() + timeout_s
        control = ServerControl(self.url, timeout_s=10.0)
        try:
            while not _accepts(self.spec.host, self._port) or not control.health():
                if not self.is_alive:
                    if not self._port_was_taken():
                        raise RolloutError(f"server {self.url} ended before it was ready: {self._post_mortem()}")
                    logger.warning("port taken meanwhile url=%s; starting again on another", self.url)
                    self.start()
                    control.close()
                    control = ServerControl(self.url, timeout_s=10.0)
                if time.monotonic() > deadline:
                    text = f"server {self.url} was not ready after {timeout_s:g} s: {self._post_mortem()}"
                    self.stop()
                    raise DeadlineError(text)
                time.sleep(_POLL_S)
        finally:
            control.close()
        self.check()  # someone else's server may have answered on a stolen port
        with ServerControl(self.url, timeout_s=60.0) as control:
            control.freeze_gc()  # flushing collects garbage; without this it walks everything ever imported
        logger.info("server ready url=%s", self.url)

    def check(self) -> None:
        """Raise RolloutError, with exit code and last log lines, where the server is not running."""
        if not self.is_alive:
            raise RolloutError(f"server {self.url} is not running: {self._post_mortem()}")

    def stop(self) -> None:
        """Kill the whole process tree; idempotent."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()  # the guardian ends the server's session
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()  # the server dies with its guardian
            process.wait(timeout=10)

    def last_log_lines(self, count: int = 30) -> str:
        """The end of what this start wrote to its log."""
        try:
            with self.spec.log_path.open("rb") as log:
                log.seek(max(self._log_start, self.spec.log_path.stat().st_size - 20_000))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-count:])
        except OSError as error:
            return f"(log not readable: {error})"

    def _post_mortem(self) -> str:
        if self._process is None:
            return "it was never started"
        exit_code = self._process.poll()
        state = "still running" if exit_code is None else f"exit code {exit_code}"
        return f"{state}. Log: {self.spec.log_path}. Its last lines:\n{self.last_log_lines()}"

    def _port_was_taken(self) -> bool:
        if self.spec.port or self._starts >= _PORT_ATTEMPTS:
            return False
        text = self.last_log_lines(200).lower()
        return "address already in use" in text or "port is already in use" in text


def server_arguments(spec: ServerSpec, port: int) -> dict[str, Any]:
    """SGLang's ServerArgs fields for this server; `config.sglang` may override our plain defaults."""
    config = spec.config
    # Token ids in, token ids out: the server needs no tokenizer, and one process fewer.
    arguments: dict[str, Any] = {"log_level": "warning", "skip_tokenizer_init": not spec.constrains}
    if config.device == "cpu":
        arguments |= _CPU_DEFAULTS
    arguments |= config.sglang
    if is_weights_directory(spec.model_path):  # no safetensors there; the publisher brings and proves the weights
        arguments["load_format"] = "dummy"
    arguments |= {
        "model_path": spec.model_path,
        "host": spec.host,
        "port": port,
        "device": config.device,
        "dtype": _DTYPES[config.precision],
        "tp_size": config.tensor,
        "mem_fraction_static": config.mem_fraction_static,
        "skip_server_warmup": True,  # wait_ready generates a token itself
        "weight_version": str(spec.policy_version),
        "random_seed": spec.seed,
    }
    max_total_tokens = config.max_total_tokens or (_CPU_TOTAL_TOKENS if config.device == "cpu" else None)
    if max_total_tokens is not None:
        arguments["max_total_tokens"] = max_total_tokens
    if spec.record_routing:
        arguments["enable_return_routed_experts"] = True
    if spec.context_length is not None:
        arguments["context_length"] = spec.context_length
    return arguments


def server_environment(spec: ServerSpec) -> dict[str, str]:
    """The parent's environment, offline, and on a CPU with one thread for each rank."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if spec.config.device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if spec.config.tensor > 1:  # SGLang asks for a binding when ranks outnumber NUMA nodes
            cores = sorted(os.sched_getaffinity(0))
            binding = (str(cores[rank % len(cores)]) for rank in range(spec.config.tensor))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(binding)
    return environment | dict(spec.environment)


def check_arguments(config: ServerConfig) -> None:
    """Raise ConfigError for pass-through arguments that we own or that the installed SGLang lacks."""
    owned = sorted(OWNED_SGLANG_ARGUMENTS.keys() & config.sglang.keys())
    problems = [f"rollout.servers.sglang.{name} is set by {OWNED_SGLANG_ARGUMENTS[name]}" for name in owned]
    known = sglang_argument_names(config.python)
    if known:
        unknown = sorted(config.sglang.keys() - known)
        problems += [f"rollout.servers.sglang.{name} is not an argument of the installed SGLang" for name in unknown]
    if problems:
        raise ConfigError("\n".join(problems))


@functools.cache
def sglang_argument_names(python: str | None = None) -> frozenset[str]:
    """Names of the ServerArgs fields of the SGLang that `python` would import, read without importing it.

    Empty where the sources have an unknown form; then the server itself refuses an unknown name.
    Raises RolloutError where SGLang is not installed.
    """
    code = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
    found = subprocess.run([python or sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if found.returncode:
        raise RolloutError(f"SGLang is not installed for {python or sys.executable}; see README, installation")
    root = Path(found.stdout.strip()) / "srt"
    names: set[str] = set()
    fields = root / "arg_groups" / "field_order.py"  # SGLang 0.5.22 and later
    if fields.exists():
        names = {
            node.value
            for node in ast.walk(ast.parse(fields.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
        }
    else:
        for node in ast.walk(ast.parse((root / "server_args.py").read_text())):
            if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
                annotated = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
                names = {target.id for target in annotated if isinstance(target, ast.Name)}
    return frozenset(names)


@functools.cache
def reachable_address(host: str) -> str:
    """Where a server bound to `host` is reached: this node's own address where it is bound to all of them."""
    if host != "0.0.0.0":
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # picks the outgoing interface; sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((reachable_address(host), port), timeout=1.0).close()
    except OSError:
        return False
    return True
