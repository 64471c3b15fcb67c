"""Reads single tensors of a Hugging Face model directory, whole or in several files."""

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatrl.errors import ModelError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class SafetensorsReader:
    """`names` and `read(name)` over a model directory; files open lazily and close with the context."""

    def __init__(self, path: str | Path) -> None:
        """Raises ModelError where the directory has no safetensors weights."""
        self._directory = Path(path)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._file_of = self._locate()

    def _locate(self) -> dict[str, str]:
        index = self._directory / INDEX_FILE
        if index.is_file():
            try:
                return dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ModelError(f"{index} is not readable ({error!r}); fetch the model directory again") from error
        if (self._directory / SINGLE_FILE).is_file():
            return dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        raise ModelError(
            f"{self._directory} has neither {INDEX_FILE} nor {SINGLE_FILE}; weights must be in safetensors form"
        )

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._directory / name
            if not path.is_file():
                raise ModelError(f"{path} is named in {INDEX_FILE} but does not exist; the model directory is torn")
            try:
                self._open[name] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} ({path.stat().st_size} bytes) is not readable: {error}; fetch the model directory again"
                ) from error
        return self._open[name]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def read(self, name: str) -> Tensor:
        try:
            return self._file(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(
                f"{self._directory / self._file_of[name]} holds no readable {name}: {error}; fetch the directory again"
            ) from error

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
