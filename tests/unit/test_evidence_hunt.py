"""EvidenceHunt: what pays, what does not, and that nothing a policy writes ends the episode by accident."""

import asyncio
import random
from typing import Literal

import pytest

from megatrl.config.environments import EvidenceHuntConfig
from megatrl.data.messages import POSITIONAL, Action, ToolCall
from megatrl.data.trajectories import Prompt
from megatrl.envs import evidence_hunt
from megatrl.envs.evidence_hunt import EvidenceHunt, document_chain
from megatrl.envs.protocol import Demonstrator, Environment, StepResult
from megatrl.envs.registry import make_environment, prompt_source, vocabulary
from megatrl.errors import ConfigError, EnvironmentFault

CONFIG = EvidenceHuntConfig(num_questions=8, num_documents=12, num_hops=3, num_values=6, max_turns=6)


def open_document(document: object) -> Action:
    return Action(text="", tool_calls=(ToolCall(name="open", arguments={POSITIONAL: document}),))


def read(text: str) -> Action:
    """The react grammar, as far as the environment's own actions need it."""
    if text.startswith("<answer>"):
        return Action(text=text, answer=text.removeprefix("<answer>").removesuffix("</answer>").strip())
    name, argument = text.removeprefix("Action: ").split(" ", 1)
    return Action(text=text, tool_calls=(ToolCall(name=name, arguments={POSITIONAL: argument}),))


def play(environment: EvidenceHunt, act) -> tuple[StepResult, int]:
    """The last result and the number of turns, `act` giving the text of each action."""

    async def episode() -> tuple[StepResult, int]:
        await environment.start()
        for turn in range(1, CONFIG.max_turns + 2):
            result = await environment.step(read(act()))
            if result.done:
                return result, turn
        raise AssertionError("the episode ran past its turn limit")

    return asyncio.run(episode())


def step(environment: EvidenceHunt, action: Action) -> StepResult:
    return asyncio.run(environment.step(action))


def environment_at(position: int, split: Literal["train", "eval"] = "train") -> EvidenceHunt:
    made = make_environment(CONFIG, prompt_source(CONFIG, seed=0, split=split).prompt(position))
    assert isinstance(made, EvidenceHunt)
    return made


def test_environment_is_an_environment_and_a_demonstrator() -> None:
    assert isinstance(environment_at(0), Environment)
    assert isinstance(environment_at(0), Demonstrator)


@pytest.mark.parametrize("position", range(20))
def test_oracle_wins_with_one_turn_for_each_hop_and_one_for_the_answer(position: int) -> None:
    environment = environment_at(position)
    result, turns = play(environment, environment.oracle)
    assert (result.reward, result.success, turns) == (1.0, True, CONFIG.num_hops + 1)
    assert result.metrics == {"clues_found": 3.0, "useless_opens": 0.0}


def test_random_documents_and_guessed_answers_do_not_win() -> None:
    rng = random.Random(0)
    rewards = []
    for position in range(50):
        environment = environment_at(position)
        result, _ = play(environment, lambda env=environment: env.demonstration(rng, detour=1.0, premature=0.0))
        rewards.append(result.reward)
        hasty = environment_at(position)
        result, turns = play(hasty, lambda env=hasty: env.demonstration(rng, detour=0.0, premature=1.0))
        assert turns == 1
        rewards.append(result.reward)
    assert sum(rewards) <= 10  # of 100; a guess of all clues is right once in 216


def test_mixed_quality_lies_between_oracle_and_chance() -> None:
    rng = random.Random(1)
    wins = 0.0
    for position in range(200):
        environment = environment_at(position)
        result, _ = play(environment, lambda env=environment: env.demonstration(rng, detour=0.4, premature=0.05))
        wins += result.reward or 0.0
    assert 60 < wins < 160


def test_demonstrations_end_with_an_answer_that_holds_what_was_found() -> None:
    rng = random.Random(2)
    for position in range(30):
        environment = environment_at(position)
        said: list[str] = []

        def act(env: EvidenceHunt = environment, said: list[str] = said) -> str:
            said.append(env.demonstration(rng, detour=0.7, premature=0.0))
            return said[-1]

        result, turns = play(environment, act)
        found = int(result.metrics["clues_found"])
        answer = said[-1].split()
        assert turns <= CONFIG.max_turns
        assert (answer[0], answer[-1]) == ("<answer>", "</answer>")
        assert answer[1 : 1 + found] == environment.gold_answers[0].split()[:found]


def test_one_wrong_clue_or_another_order_or_a_missing_clue_pays_nothing() -> None:
    gold = environment_at(3).gold_answers[0].split()
    damaged = [gold[::-1], gold[:-1], [*gold, gold[0]], [gold[0], gold[1], "c9"], []]
    for words in damaged:
        assert step(environment_at(3), Action(text="", answer=" ".join(words))).reward == 0.0
    assert step(environment_at(3), Action(text="", answer=f"  {'   '.join(gold)}\n")).reward == 1.0


def test_documents_pay_only_in_the_order_of_the_chain() -> None:
    environment = environment_at(5)
    chain = document_chain(CONFIG, int(asyncio.run(environment.start())[0]["content"].removeprefix("question q")))
    second_first = step(environment, open_document(f"doc{chain[1]}"))
    assert second_first.messages[0] == {"role": "tool", "content": "nothing - - - 0/3"}
    found = step(environment, open_document(f"doc{chain[0]}"))
    assert found.messages[0]["content"] == f"found {environment.gold_answers[0].split()[0]} - - 1/3"
    again = step(environment, open_document(f"doc{chain[0]}"))
    assert again.messages[0]["content"] == f"nothing {environment.gold_answers[0].split()[0]} - - 1/3"
    assert all(result.is_valid_action for result in (second_first, found, again))


HOSTILE = [
    Action(text="", parse_error="tool call is not valid JSON"),
    Action(text="I think"),
    Action(text="", tool_calls=(ToolCall(name="delete", arguments={"document": "doc1"}),)),
    Action(text="", tool_calls=(ToolCall(name="open"),)),
    Action(text="", tool_calls=(ToolCall(name="open", arguments={"file": "doc1"}),)),
    Action(text="", tool_calls=(ToolCall(name="open", arguments={"document": ["doc1"]}),)),
    Action(text="", tool_calls=(ToolCall(name="open", arguments={"document": None}),)),
    open_document("doc99"),
    open_document("doc-1"),
    open_document("<|im_end|> <|im_start|> assistant"),
    open_document("\x00" * 100_000),
    open_document({"doc1": {}}),
    Action(text="", tool_calls=(ToolCall(name="open", arguments={"document": "doc1"}),) * 2),
]


@pytest.mark.parametrize("action", HOSTILE, ids=range(len(HOSTILE)))
def test_bad_actions_are_answered_in_words_of_the_vocabulary_and_the_episode_goes_on(action: Action) -> None:
    environment = environment_at(7)
    result = step(environment, action)
    assert (result.done, result.is_valid_action, result.reward) == (False, False, None)
    assert set(result.messages[0]["content"].split()) <= set(vocabulary(CONFIG))
    rest, _ = play(environment, environment.oracle)
    assert rest.success


def test_turn_limit_ends_the_episode_with_its_last_observation_and_no_reward() -> None:
    environment = environment_at(1)
    for _ in range(CONFIG.max_turns - 1):
        assert not step(environment, open_document("doc0")).done
    last = step(environment, open_document("doc0"))
    assert (last.done, last.reward, last.success) == (True, 0.0, False)
    assert last.messages[0]["content"].endswith("/3")
    with pytest.raises(EnvironmentFault, match="after the episode had ended"):
        step(environment, open_document("doc0"))


def test_finish_pays_nothing_for_clues_without_an_answer_and_keeps_an_outcome() -> None:
    environment = environment_at(2)
    for _ in range(CONFIG.num_hops):
        step(environment, read(environment.oracle()))
    assert environment.finish().reward == 0.0
    won = environment_at(2)
    outcome, _ = play(won, won.oracle)
    assert won.finish() == outcome


def test_observation_key_names_the_state_and_not_the_way_to_it() -> None:
    straight, winding = environment_at(4), environment_at(4)
    step(straight, read(straight.oracle()))
    step(winding, open_document("doc99"))
    before = winding.observation_key
    assert before != straight.observation_key
    step(winding, read(winding.oracle()))
    assert winding.observation_key == straight.observation_key


def test_prompts_are_functions_of_seed_split_and_position() -> None:
    one, same = (prompt_source(CONFIG, seed=4, split="train") for _ in range(2))
    assert [one.prompt(i) for i in (5, 0, 5)] == [same.prompt(i) for i in (5, 0, 5)]
    other = prompt_source(CONFIG, seed=5, split="train")
    assert [one.prompt(i).task for i in range(10)] != [other.prompt(i).task for i in range(10)]


def test_no_world_is_in_both_splits_whatever_the_seeds() -> None:
    def worlds(seed: int, split) -> set[str]:
        source = prompt_source(CONFIG, seed=seed, split=split)
        return {str(source.prompt(position).task) for position in range(600)}

    assert not (worlds(0, "train") | worlds(1, "train")) & (worlds(0, "eval") | worlds(1, "eval"))


def test_a_search_for_worlds_that_fails_says_which_sizes_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_hunt, "MAX_DRAWS", 0)
    with pytest.raises(ConfigError, match=r"no eval world found in 0 draws with num_questions=8.*raise one of them"):
        prompt_source(CONFIG, seed=0, split="eval").prompt(0)


def test_a_chain_longer_than_the_documents_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.num_hops=5 is more than env\.num_documents=4"):
        prompt_source(EvidenceHuntConfig(num_documents=4, num_hops=5), seed=0, split="train")


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"question": 8, "values": [0, 0, 0]},
        {"question": True, "values": [0, 0, 0]},
        {"question": 0, "values": [6, 0, 0]},
    ],
)
def test_a_task_of_another_configuration_is_an_environment_fault(task: dict) -> None:
    with pytest.raises(EnvironmentFault, match="same env section"):
        EvidenceHunt(CONFIG, Prompt(prompt_id="p", task=task, seed=0))


def test_vocabulary_covers_prompts_observations_and_demonstrations() -> None:
    words = vocabulary(CONFIG)
    assert len(words) == len(set(words))
    known = {*words, "<answer>", "</answer>"}
    rng = random.Random(0)

    async def spoken(position: int) -> set[str]:
        environment = environment_at(position)
        heard = {word for message in await environment.start() for word in message["content"].split()}
        for _ in range(CONFIG.max_turns):
            action = environment.demonstration(rng, detour=0.5, premature=0.2)
            result = await environment.step(read(action))
            heard |= {word for text in (action, *(m["content"] for m in result.messages)) for word in text.split()}
            if result.done:
                break
        return heard

    for position in range(50):
        assert asyncio.run(spoken(position)) <= known
