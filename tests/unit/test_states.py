from megatrl.data.states import segment_tokens, shortened_history, trajectory_states, transcript_end
from tests.fakes.frozen_models import make_trajectory

TURNS = [((1, 2), (3,)), ((4,), (5, 6)), ((7, 8), (9,))]


def lengths(trajectory):
    return [(s.segment_index, s.turn_index, s.length) for s in trajectory_states(trajectory)]


def test_a_state_ends_with_the_observation_before_its_action():
    trajectory = make_trajectory(TURNS)
    assert lengths(trajectory) == [(0, 0, 2), (0, 1, 4), (0, 2, 8)]
    assert segment_tokens(trajectory.segments[0])[:4] == (1, 2, 3, 4)


def test_a_trailing_observation_is_one_more_state():
    trajectory = make_trajectory(TURNS, trailing=(10, 11))
    assert lengths(trajectory)[-1] == (0, 3, 11)
    assert transcript_end(trajectory).length == 11


def test_without_a_trailing_observation_the_transcript_ends_with_the_last_action():
    assert transcript_end(make_trajectory(TURNS)).length == 9


def test_prefixes_restart_at_a_new_segment():
    trajectory = make_trajectory(TURNS, segment_starts=[2], trailing=(10,))
    assert lengths(trajectory) == [(0, 0, 2), (0, 1, 4), (1, 2, 2), (1, 3, 4)]


def test_a_history_that_fits_is_untouched():
    segment = make_trajectory(TURNS).segments[0]
    assert shortened_history(segment, 8, 8) == (1, 2, 3, 4, 5, 6, 7, 8)


def test_a_long_history_keeps_the_task_and_the_longest_run_of_last_turns():
    segment = make_trajectory(TURNS).segments[0]
    assert shortened_history(segment, 8, 7) == (1, 2, 4, 5, 6, 7, 8)
    assert shortened_history(segment, 8, 6) == (1, 2, 7, 8)
    assert shortened_history(segment, 8, 4) == (1, 2, 7, 8)


def test_a_history_whose_task_and_last_observation_do_not_fit_is_refused():
    segment = make_trajectory(TURNS).segments[0]
    assert shortened_history(segment, 8, 3) is None
    assert shortened_history(segment, 2, 1) is None
