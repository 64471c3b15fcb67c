"""Sections of the engines: model, actor on Megatron-Core, rollout on SGLang, publishing."""

from typing import Annotated, Literal

from pydantic import Field

from megatrl.config.section import Section

Family = Literal["qwen3", "qwen3_moe", "llama3"]
Precision = Literal["fp32", "bf16"]


class HFModel(Section):
    """A model directory in Hugging Face form, on a local or shared disk. Nothing is downloaded."""

    kind: Literal["hf"] = "hf"
    path: str


class TinyModel(Section):
    """A small random model with a word-level tokenizer for the environment, made by `megatrl make-tiny`."""

    kind: Literal["tiny"] = "tiny"
    family: Family = "qwen3_moe"
    hidden_size: int = Field(default=64, gt=0)
    num_layers: int = Field(default=2, gt=0)
    num_heads: int = Field(default=4, gt=0)
    num_kv_heads: int = Field(default=2, gt=0)
    head_dim: int = Field(default=16, gt=0)
    ffn_size: int = Field(default=128, gt=0)
    """Of a dense layer; of one expert in a mixture."""
    num_experts: int = Field(default=8, gt=0)
    num_experts_per_token: int = Field(default=2, gt=0)
    tie_word_embeddings: bool = False
    seed: int = 0


ModelConfig = Annotated[HFModel | TinyModel, Field(discriminator="kind")]


class LayoutConfig(Section):
    """Degrees of parallelism. Data parallelism is world_size / (tensor x pipeline x context)."""

    world_size: int = Field(default=1, gt=0)
    tensor: int = Field(default=1, gt=0)
    pipeline: int = Field(default=1, gt=0)
    virtual_pipeline: int = Field(default=1, gt=0)
    """Model chunks for each pipeline stage; more than one makes the schedule interleaved."""
    first_stage_layers: int | None = Field(default=None, gt=0)
    """Layers of the first pipeline stage; null shares evenly."""
    last_stage_layers: int | None = Field(default=None, gt=0)
    context: int = Field(default=1, gt=0)
    """Ranks that share the tokens of each sequence."""
    expert: int = Field(default=1, gt=0)
    expert_tensor: int | None = Field(default=None, gt=0)
    """Ranks over which one expert is cut; null means `tensor` where expert is 1, and 1 otherwise."""
    sequence_parallel: bool = False
    """Required with tensor > 1 on mixture models."""


class OptimizerConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: int | None = Field(default=None, gt=0)
    """Steps of the loop after which min_lr is reached; null means train.num_steps."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad_norm: float = Field(default=1.0, gt=0)


class RouterConfig(Section):
    """The router of a mixture model in training. See docs/routing-replay.md."""

    replay: bool = False
    """Servers record which experts they chose; old logprobs and updates use the same ones."""
    precision: Literal["fp32", "model"] = "fp32"
    """Of the router's scores. `model` rounds them as transformers and SGLang do in bf16."""
    load_balancing: Literal["none", "sequence", "global"] = "none"
    """Auxiliary loss on expert loads, of each sequence or of the whole minibatch."""
    load_balancing_coefficient: float = Field(default=0.0, ge=0)
    z_loss_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the mean over tokens of logsumexp(router scores) squared."""
    expert_bias_update_rate: float = Field(default=0.0, ge=0)
    """Auxiliary-loss-free balancing; 0 is off. Refused for models that cannot store the bias: all so far."""


class ActorConfig(Section):
    layout: LayoutConfig = LayoutConfig()
    router: RouterConfig = RouterConfig()
    precision: Precision = "bf16"
    device: Literal["cpu", "cuda"] = "cuda"
    optimizer: OptimizerConfig = OptimizerConfig()
    distributed_optimizer: bool = True
    recompute: Literal["none", "full", "selective"] = "none"
    timeout_s: float = Field(default=1800.0, gt=0)
    """Deadline of one collective call on the workers."""


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)


class ServerConfig(Section):
    num_servers: int = Field(default=1, gt=0)
    tensor: int = Field(default=1, gt=0)
    """SGLang's own tensor parallel degree, in devices for each server."""
    device: Literal["cpu", "cuda"] = "cuda"
    precision: Precision = "bf16"
    python: str | None = None
    """Interpreter of the server's own environment or container; null uses this one."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    request_timeout_s: float = Field(default=600.0, gt=0)
    max_restarts: int = Field(default=3, ge=0)
    """Servers that died and were started again, counted over all servers of a run; one more ends the run."""
    max_total_tokens: int | None = Field(default=None, gt=0)
    """KV cache size in tokens; null lets SGLang decide."""
    mem_fraction_static: float = Field(default=0.8, gt=0, lt=1)
    sglang: dict[str, str | int | float | bool] = {}
    """More SGLang server arguments by their upstream names; keys that megatrl owns are refused."""


class RolloutConfig(Section):
    sampling: SamplingConfig = SamplingConfig()
    servers: ServerConfig = ServerConfig()
    chat_format: Literal["chatml", "llama3"] = "chatml"
    tool_format: Literal["qwen", "react"] = "qwen"
    """How actions are written: <tool_call> JSON, or `Action: tool arguments` and <answer>."""
    max_turns: int = Field(default=50, gt=0)
    max_action_tokens: int = Field(default=512, gt=0)
    context_tokens: int = Field(default=4096, gt=1)
    """Longest trajectory in tokens, prompt and observations included."""
    max_observation_tokens: int = Field(default=1024, gt=0)
    """Longer tool results are cut, with a marker, before rendering."""
    episode_timeout_s: float = Field(default=1800.0, gt=0)
    tool_timeout_s: float = Field(default=60.0, gt=0)
    max_concurrent_episodes: int = Field(default=512, gt=0)
    max_attempts: int = Field(default=2, ge=1)
    """Attempts at one trajectory when its infrastructure fails."""
    max_failure_fraction: float = Field(default=0.2, ge=0, le=1)
    """The step fails when more trajectories than this end in an infrastructure failure."""


class PublishConfig(Section):
    route: Literal["tensor", "broadcast", "disk"] = "tensor"
    bucket_bytes: int = Field(default=512 * 1024 * 1024, gt=0)
    timeout_s: float = Field(default=600.0, gt=0)
    verify: bool = True
    """Prove by checksum that every server holds the published weights."""
