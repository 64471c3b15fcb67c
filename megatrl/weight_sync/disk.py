"""Route `disk`: the weights are written as a Hugging Face directory that all servers can see, then loaded."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from megatrl.rollout.control import ServerControl
from megatrl.weight_sync.buckets import Bucket
from megatrl.weight_sync.fanout import Failures, on_each


class DiskTransport:
    """Writes below `directory` on a file system shared with the servers.

    The directory of the last good publish stays until the next one is live: after a failed load SGLang
    goes back to the files it was given before.
    """

    changes_weights_while_sending = False

    def __init__(self, *, directory: Path, timeout_s: float) -> None:
        self.bytes_beside_http: Counter[str] = Counter()
        self._directory = directory.absolute()
        self._timeout_s = timeout_s
        self._writing: Path | None = None
        self._live: Path | None = None
        self._weight_map: dict[str, str] = {}

    def start(self, servers: Sequence[ServerControl]) -> Failures:
        self.abandon()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._writing = Path(tempfile.mkdtemp(prefix="weights-", dir=self._directory))
            self._writing.chmod(0o755)  # mkdtemp makes it private, and servers may run as another user
        except OSError as error:
            return {server.url: f"cannot write below {self._directory}: {error}" for server in servers}
        return {}

    def send(self, servers: Sequence[ServerControl], bucket: Bucket) -> Failures:
        assert self._writing is not None, "send comes after start"
        name = f"model-{bucket.index:05d}.safetensors"
        try:
            # Cloned because a file must not hold two names of one memory (a tied embedding and its head).
            tensors = {key: tensor.cpu().clone() for key, tensor in zip(bucket.names, bucket.tensors, strict=True)}
            save_file(tensors, self._writing / name, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            return {server.url: f"cannot write {self._writing / name}: {error}" for server in servers}
        self._weight_map |= dict.fromkeys(bucket.names, name)
        num_bytes = (self._writing / name).stat().st_size
        self.bytes_beside_http.update({server.url: num_bytes for server in servers})
        return {}

    def finish(self, servers: Sequence[ServerControl]) -> Failures:
        assert self._writing is not None, "finish comes after start"
        index = {"metadata": {}, "weight_map": self._weight_map}
        (self._writing / "model.safetensors.index.json").write_text(json.dumps(index))
        path = str(self._writing)
        failures = on_each(
            servers,
            lambda server: server.update_weights_from_disk(path, flush_cache=False, timeout_s=self._timeout_s),
        )
        if len(failures) < len(servers):  # those that have loaded it go back to it when a later load fails
            if self._live is not None:
                shutil.rmtree(self._live, ignore_errors=True)
            self._live, self._writing, self._weight_map = self._writing, None, {}
        return failures

    def abandon(self) -> None:
        if self._writing is not None:
            shutil.rmtree(self._writing, ignore_errors=True)
        self._writing, self._weight_map = None, {}

    def close(self) -> None:
        self.abandon()
        if self._live is not None:
            shutil.rmtree(self._live, ignore_errors=True)
            self._live = None
