"""From the configured route to a ready Publisher."""

from collections.abc import Sequence
from pathlib import Path

from megatrl.config.engines import PublishConfig, ServerConfig
from megatrl.config.model_shape import ModelShape
from megatrl.errors import WeightSyncError
from megatrl.rollout.control import ServerControl
from megatrl.weight_sync.broadcast import BroadcastTransport
from megatrl.weight_sync.disk import DiskTransport
from megatrl.weight_sync.plan import plan_publish
from megatrl.weight_sync.publisher import Publisher
from megatrl.weight_sync.tensor import TensorTransport
from megatrl.weight_sync.transport import Transport


def make_publisher(
    config: PublishConfig,
    model: ModelShape,
    server_config: ServerConfig,
    urls: Sequence[str] | None,
    *,
    directory: Path | None = None,
    master_address: str = "127.0.0.1",
) -> Publisher:
    """A publisher for one actor rank. Only rank 0 talks to servers; the others pass None for `urls`.

    `directory` is needed by route disk (shared with the servers), `master_address` by route broadcast: the
    address of this host under which the servers reach it.
    """
    plan = plan_publish(config, model, server_config)
    if urls is None:
        return Publisher(plan, ())
    servers = [ServerControl(url, timeout_s=config.timeout_s) for url in urls]
    return Publisher(plan, servers, _transport(config, server_config, directory, master_address))


def _transport(config: PublishConfig, servers: ServerConfig, directory: Path | None, master_address: str) -> Transport:
    if config.route == "tensor":
        return TensorTransport(tensor=servers.tensor, timeout_s=config.timeout_s)
    if config.route == "broadcast":
        return BroadcastTransport(
            tensor=servers.tensor,
            backend="gloo" if servers.device == "cpu" else "nccl",
            timeout_s=config.timeout_s,
            master_address=master_address,
            device=servers.device,
        )
    if directory is None:
        raise WeightSyncError("publish.route disk needs a directory on a file system shared with the servers")
    return DiskTransport(directory=directory, timeout_s=config.timeout_s)
