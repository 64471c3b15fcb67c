"""A stub of SGLang's weight endpoints that keeps real tensors, with faults to switch on.

Written from the API's description and not from megatrl's code, so that both can disagree.
"""

import base64
import hashlib
import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file


def fused_parameters(weights: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """SGLang's fused tensors at tensor parallel 1, from a complete Hugging Face set."""
    fused: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if "experts" in name or any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            continue
        if "q_proj" in name:
            parts = [weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            fused[name.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [tensor, weights[name.replace("gate_proj", "up_proj")]]
            )
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = -(-tensor.shape[0] // 64) * 64
            fused[name] = torch.cat([tensor, torch.zeros(rows - tensor.shape[0], tensor.shape[1], dtype=tensor.dtype)])
        else:
            fused[name] = tensor
    for prefix in {name.split(".0.gate_proj")[0] for name in weights if ".experts.0.gate_proj" in name}:
        experts = range(num_experts)
        fused[f"{prefix}.w13_weight"] = torch.stack(
            [
                torch.cat([weights[f"{prefix}.{expert}.{part}.weight"] for part in ("gate_proj", "up_proj")])
                for expert in experts
            ]
        )
        fused[f"{prefix}.w2_weight"] = torch.stack(
            [weights[f"{prefix}.{expert}.down_proj.weight"] for expert in experts]
        )
    return fused


class WeightServer:
    """Serves on a free port of 127.0.0.1. `calls` is the order of the paths that were asked for."""

    def __init__(self, weights: dict[str, torch.Tensor], *, num_experts: int = 0, has_sessions: bool = True) -> None:
        self.weights = dict(weights)
        self.num_experts = num_experts
        self.has_sessions = has_sessions
        self.version = "0"
        self.is_paused = False
        self.is_session_open = False
        self.calls: list[str] = []
        self.num_updates = 0
        self.reject_update: int | None = None  # number of the bucket to refuse, from 1
        self.ignore_names: str | None = None  # names with this text are skipped, with success
        self.tamper_name: str | None = None  # this tensor is stored changed in one element
        self.refuses_flush = False
        self.cache: dict[str, str] = {}  # prompt -> version it was computed under
        self.num_body_bytes = 0
        self.disk_path = ""
        self.is_dead = False
        self._dies_at: int | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.is_dead:
            self.die()

    def die(self) -> None:
        """From now on connections are refused, and open ones are cut at the next request."""
        self.is_dead = True
        self._server.shutdown()
        self._server.server_close()

    def die_at_update(self, number: int) -> None:
        """Die when bucket `number`, from 1, arrives, without an answer."""
        self._dies_at = number

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in ("/begin_weight_update", "/end_weight_update"):
            if not self.has_sessions:
                return 404, {"detail": "Not Found"}
            wants_open = path == "/begin_weight_update"
            if self.is_session_open == wants_open:
                return 400, {
                    "success": False,
                    "message": "a weight-update session is already open" if wants_open else "no",
                }
            self.is_session_open = wants_open
        elif path == "/pause_generation":
            self.is_paused = True
        elif path == "/continue_generation":
            self.is_paused = False
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/flush_cache":
            if self.refuses_flush:
                return 400, "Flush cache failed.\n"
            self.cache.clear()
        elif path == "/weights_checker":
            fused = fused_parameters(self.weights, self.num_experts)
            sums = {
                name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()[:16] for name, t in fused.items()
            }
            return 200, {"success": True, "message": "", "ranks": [{"checksums": sums}]}
        elif path == "/update_weights_from_tensor":
            return self._update(body)
        elif path == "/update_weights_from_disk":
            self.num_updates += 1
            if self.num_updates == self.reject_update:
                return 400, {"success": False, "message": "refused by the stub"}
            self.disk_path = body["model_path"]
            for file in sorted(Path(self.disk_path).glob("*.safetensors")):
                self.weights |= load_file(file)
        else:
            return 404, {"detail": "Not Found"}
        return 200, {"success": True, "message": "Success"}

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.has_sessions and not self.is_session_open:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        self.num_updates += 1
        if self.num_updates == self._dies_at:
            self.die()
        if self.num_updates == self.reject_update:
            return 400, {"success": False, "message": "refused by the stub"}
        content = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        for item in content["metadata"]:
            if self.ignore_names and self.ignore_names in item.name:
                continue
            raw = content["flattened_tensor"][item.start_idx : item.end_idx].clone()
            tensor = raw.view(item.dtype).reshape(item.shape)
            if item.name == self.tamper_name:
                tensor.view(-1)[-1] += 1
            self.weights[item.name] = tensor
        return 200, {"success": True, "message": "Success"}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                path = self.path.split("?")[0]
                stub.calls.append(path)
                status, reply = (0, "") if stub.is_dead else stub.answer(path, body if isinstance(body, dict) else {})
                if stub.is_dead:
                    self.close_connection = True
                    return
                is_text = isinstance(reply, str)
                raw = reply.encode() if is_text else json.dumps(reply).encode()
                stub.num_body_bytes += length + len(raw)
                self.send_response(status)
                self.send_header("content-type", "text/plain" if is_text else "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
