"""ServerControl: the control plane of one SGLang server (0.5.21 or later) over synchronous HTTP.

Nothing is retried here. A refusal (4xx) is a ServerRejectedError with the server's own words; a
server that does not answer, or answers 5xx, is a RolloutError. Proxies from the environment are
ignored: servers live on the cluster's own network.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import httpx

from megatrl.errors import RolloutError, ServerRejectedError

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request at INFO

PauseMode = Literal["abort", "retract", "in_place"]


def error_text(body: str) -> str:
    """The message of an SGLang error body, cut to 2000 characters."""
    return body.strip()[:2000] or "(empty body)"


class ServerControl:
    """Control calls to the server at `url`. Each waits at most `timeout_s`."""

    def __init__(self, url: str, *, timeout_s: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._client = httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)
        self.num_body_bytes = 0
        """Bytes of all request and response bodies so far. Calls in several threads at once may lose a count."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    # Reading

    def health(self, *, timeout_s: float = 30.0) -> bool:
        """True where the server generated one token just now (about a second when it is idle)."""
        try:
            return self._client.get("/health_generate", timeout=timeout_s).status_code == 200
        except httpx.HTTPError:
            return False

    def model_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Model path, architectures, weight_version, ..."""
        return self._request("GET", "/model_info", None, timeout_s=timeout_s).json()

    def weight_version(self) -> str:
        return str(self.model_info()["weight_version"])

    def server_info(self) -> dict[str, Any]:
        """The server's resolved arguments and its internal state."""
        return self._get("/server_info")

    def weights_checksum(self) -> dict[str, str]:
        """Checksum of each tensor, keyed `rank/name` under SGLang's own (fused) names."""
        ranks = self._post("/weights_checker", {"action": "checksum"})["ranks"]
        return {
            f"{rank}/{name}": value for rank, entry in enumerate(ranks) for name, value in entry["checksums"].items()
        }

    # Flow of requests

    def flush_cache(self, *, timeout_s: float = 30.0) -> None:
        """Drop the prefix cache. Raises where requests still run, because then nothing was dropped."""
        self._request("POST", f"/flush_cache?timeout={timeout_s:g}", None, timeout_s=timeout_s + 10)

    def pause_generation(self, mode: PauseMode = "retract") -> None:
        """`abort` ends running requests, `retract` re-queues them without KV cache, `in_place` freezes them."""
        self._post("/pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        self._post("/continue_generation", {})

    def freeze_gc(self) -> None:
        """Take everything alive now out of the server's garbage collection, which every flush runs."""
        self._request("POST", "/freeze_gc", None)

    def abort_all(self) -> None:
        """Ask for every running request to end with finish_reason abort."""
        self._post("/abort_request", {"rid": "", "abort_all": True})

    # Weights

    def supports_update_session(self) -> bool:
        """False on servers before 0.5.21, which have no begin/end_weight_update."""
        try:
            self.begin_weight_update()
        except ServerRejectedError as error:
            if "HTTP 404" in error.message:
                return False
            raise
        self.end_weight_update()
        return True

    def begin_weight_update(self) -> None:
        self._succeed("/begin_weight_update", {})

    def end_weight_update(self) -> None:
        self._succeed("/end_weight_update", {})

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = "flattened_bucket",
        flush_cache: bool = False,
        weight_version: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Load base64 pickles, one for each tensor parallel rank. Needs an open update session.

        The server answers success for names it does not know and dies of a wrong shape: the
        caller checks names and shapes before, and checksums after.
        """
        body: dict[str, Any] = {
            "serialized_named_tensors": list(serialized_named_tensors),
            "load_format": load_format,
            "flush_cache": flush_cache,
        }
        if weight_version is not None:
            body["weight_version"] = weight_version
        self._succeed("/update_weights_from_tensor", body, timeout_s=timeout_s)

    def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: Literal["nccl", "gloo"],
        timeout_s: float | None = None,
    ) -> None:
        """Join a torch.distributed group; returns when every member has joined."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._succeed("/init_weights_update_group", body, timeout_s=timeout_s)

    def destroy_weights_update_group(self, group_name: str) -> None:
        self._succeed("/destroy_weights_update_group", {"group_name": group_name})

    def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Receive broadcasts from rank 0 of the group, in the order of `names`. Needs an open session."""
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": load_format,
            "flush_cache": flush_cache,
        }
        if weight_version is not None:
            body["weight_version"] = weight_version
        self._succeed("/update_weights_from_distributed", body, timeout_s=timeout_s)

    def update_weights_from_disk(
        self,
        model_path: str,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        """Load a Hugging Face directory that the server can see under this absolute path."""
        body: dict[str, Any] = {"model_path": model_path, "flush_cache": flush_cache}
        if weight_version is not None:
            body["weight_version"] = weight_version
        self._succeed("/update_weights_from_disk", body, timeout_s=timeout_s)

    def update_weight_version(self, version: str) -> None:
        """Name the weights that the server holds now; samples carry the name from here on."""
        self._succeed("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    # Device memory (CUDA with --enable-memory-saver; accepted without effect elsewhere)

    def release_memory_occupation(self, tags: Sequence[str] = ("kv_cache", "weights")) -> None:
        self._post("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory_occupation(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._post("/resume_memory_occupation", {"tags": list(tags)})

    # Transport

    def _succeed(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> None:
        reply = self._post(path, body, timeout_s=timeout_s)
        if not (isinstance(reply, dict) and reply.get("success")):
            raise RolloutError(f"{self.url}{path} did not confirm success; it answered {error_text(str(reply))}")

    def _get(self, path: str) -> Any:
        return self._request("GET", path, None).json()

    def _post(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> Any:
        response = self._request("POST", path, body, timeout_s=timeout_s)
        if not response.headers.get("content-type", "").startswith("application/json"):
            return None
        return response.json()

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float | None = None
    ) -> httpx.Response:
        timeout_s = timeout_s or self._timeout_s
        try:
            response = self._client.request(method, path, json=body, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise RolloutError(f"{self.url}{path} did not answer within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise RolloutError(
                f"{self.url}{path} failed: {type(error).__name__}: {error}. Is the server alive?"
            ) from error
        self.num_body_bytes += len(response.request.content) + len(response.content)
        if 400 <= response.status_code < 500:
            raise ServerRejectedError(
                f"{self.url}{path} was refused with HTTP {response.status_code}: {error_text(response.text)}"
            )
        if response.status_code != 200:
            raise RolloutError(f"{self.url}{path} failed with HTTP {response.status_code}: {error_text(response.text)}")
        return response
