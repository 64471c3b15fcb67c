"""One rank of an actor in a small gloo world."""

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.config.engines import ActorConfig


def actor_worker(model_path: str, actor: ActorConfig, *, rank: int, port: int, num_steps: int = 5) -> ActorWorker:
    """Joins the ranks that come to `port` of this machine; all of them call it."""
    return ActorWorker(
        WorkerSpec(
            rank=rank,
            world_size=actor.layout.world_size,
            master_addr="127.0.0.1",
            master_port=port,
            actor=actor,
            model_path=model_path,
            seed=1,
            num_steps=num_steps,
        )
    )
