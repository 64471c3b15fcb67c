"""What an episode asks of whoever samples its actions: token ids in, token ids and logprobs out."""

from dataclasses import dataclass
from typing import Protocol

from megatrl.data.routed_experts import RoutedExperts
from megatrl.data.trajectories import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One action to sample after `input_ids`."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int = 0
    deadline_s: float = 600.0  # over all attempts at this request
    routing_key: str = ""
    """Requests with the same key go to the same server while it lives, where their prefix is cached."""
    pattern: str = ""
    """Regular expression that the sampled text must match; "" is free. Needs a server that constrains."""
    first_routed: int = 0
    """Position of the first token whose expert choices are wanted, where the sampler records them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampled action, exactly as the server returned it."""

    output_ids: tuple[int, ...]  # a sampled stop token is the last of them
    logprobs: tuple[float, ...]  # one for each output id, at the sampling temperature
    finish_reason: FinishReason  # STOP or LENGTH; an abort is retried or raised, never returned
    policy_version: int
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    routed_experts: RoutedExperts | None = None
    """Expert choices at positions `first_routed` to the last but one: the last token sampled was not
    processed yet. None where the sampler does not record."""


class Sampler(Protocol):
    """Samples actions.

    Raises ServerRejectedError where a request can never succeed and RolloutError where it failed in
    spite of retries.
    """

    async def sample(self, request: SampleRequest) -> Sample: ...
