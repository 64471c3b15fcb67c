"""What a run was made of: resolved config, its hash, git commit and package versions, for every start."""

import hashlib
import importlib.metadata
import json
import logging
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatrl
from megatrl.errors import MegatrlError
from megatrl.observability.atomic_file import replace_text, unused_path

logger = logging.getLogger(__name__)

PACKAGES = (
    "megatrl", "torch", "megatron-core", "sglang", "ray", "transformers", "tokenizers",
    "transformer-engine", "flash-attn", "numpy", "pydantic", "wandb",
)  # fmt: skip


def config_hash(run_config: Mapping[str, Any]) -> str:
    """SHA-256 of the config as canonical JSON; the order of keys does not matter."""
    text = json.dumps(run_config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def write_manifest(run_dir: Path, run_config: Mapping[str, Any], *, resume_step: int = 0) -> dict[str, Any]:
    """Add this start to `manifest.json` and write `config.json`; returns the start's entry.

    A start whose config differs from the one before keeps that one beside it and logs what changed.
    """
    config_path, manifest_path = run_dir / "config.json", run_dir / "manifest.json"
    starts = read_manifest(run_dir)["starts"] if manifest_path.exists() else []
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "resume_step": resume_step,
        "config_sha256": config_hash(run_config),
        **_git_state(Path(megatrl.__file__).parent),
        "packages": package_versions(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    if config_path.exists():
        earlier = json.loads(config_path.read_text(encoding="utf-8"))
        changed = changed_keys(earlier, json.loads(json.dumps(run_config)))
        if changed:
            kept = unused_path(run_dir / f"config-{config_hash(earlier)[:12]}.json")
            config_path.replace(kept)
            logger.warning("config differs from the last start in %s; the earlier one is %s", ", ".join(changed), kept)
    replace_text(config_path, json.dumps(run_config, indent=2, allow_nan=False) + "\n")
    replace_text(manifest_path, json.dumps({"version": 1, "starts": [*starts, start]}, indent=2) + "\n")
    return start


def read_manifest(run_dir: Path) -> dict[str, Any]:
    """The run's manifest: `starts`, oldest first.

    Raises:
        MegatrlError: there is none, or another version wrote it.
    """
    path = run_dir / "manifest.json"
    if not path.exists():
        raise MegatrlError(f"{path} does not exist; {run_dir} is not a run directory")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("version") != 1:
        raise MegatrlError(f"{path} has version {manifest.get('version')!r}; this megatrl reads version 1")
    return manifest


def changed_keys(earlier: Mapping[str, Any], later: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths whose values differ between two configs, sorted."""
    changed: list[str] = []
    for key in sorted({*earlier, *later}):
        before, after = earlier.get(key), later.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changed += changed_keys(before, after, f"{prefix}{key}.")
        elif before != after or (key in earlier) != (key in later):
            changed.append(f"{prefix}{key}")
    return changed


def package_versions() -> dict[str, str]:
    """Installed versions of the packages a result may depend on; absent ones are left out."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git_state(directory: Path) -> dict[str, Any]:
    """Commit of the code and whether it has uncommitted changes; None where it is not in a git checkout."""
    # An installed copy may lie inside a checkout of something else.
    if _git(directory, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"git_commit": None, "git_is_dirty": None}
    commit = _git(directory, "rev-parse", "HEAD")
    status = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, "git_is_dirty": None if status is None else bool(status)}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
