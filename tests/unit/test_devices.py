"""Turn-taking over shared devices: memory comes back whatever happens inside, also after half a release."""

import pytest

from megatrl.orchestration.devices import OwnedDevices, SharedDevices


class Owner:
    """Remembers who was called when; may fail while releasing, as one rank of several would."""

    def __init__(self, name: str, calls: list[str], *, fails: bool = False) -> None:
        self.name, self.calls, self.fails = name, calls, fails

    def release_memory(self) -> None:
        self.calls.append(f"{self.name} releases")
        if self.fails:
            raise ZeroDivisionError("one rank failed")

    def resume_memory(self) -> None:
        self.calls.append(f"{self.name} resumes")


def test_the_role_that_works_holds_the_memory():
    calls: list[str] = []
    devices = SharedDevices(Owner("actor", calls), Owner("servers", calls))
    with devices.lend_to_rollout():
        calls.append("episodes")
    with devices.lend_to_actor():
        calls.append("learning")
    assert calls == [
        *("actor releases", "episodes", "actor resumes"),
        *("servers releases", "learning", "servers resumes"),
    ]


@pytest.mark.parametrize("lend", ["lend_to_rollout", "lend_to_actor"])
def test_an_exception_inside_still_brings_the_memory_back(lend):
    calls: list[str] = []
    devices = SharedDevices(Owner("actor", calls), Owner("servers", calls))
    with pytest.raises(KeyboardInterrupt), getattr(devices, lend)():
        raise KeyboardInterrupt
    assert calls[-1].endswith("resumes")


def test_a_release_that_failed_half_way_is_undone_and_nothing_is_played():
    calls: list[str] = []
    devices = SharedDevices(Owner("actor", calls, fails=True), Owner("servers", calls))
    with pytest.raises(ZeroDivisionError, match="one rank failed"), devices.lend_to_rollout():
        calls.append("episodes")
    assert calls == ["actor releases", "actor resumes"]


def test_separate_roles_keep_their_devices():
    with OwnedDevices().lend_to_rollout(), OwnedDevices().lend_to_actor():
        pass
