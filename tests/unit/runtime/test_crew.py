"""How many threads decode beside other jobs: choices on a clock of the test's own."""

from collections.abc import Callable

import pytest

from quantkit.runtime.kernels.crew import LATEST, SOONEST, TRIAL, VALID, Crew


class Machine:
    """A clock, and steps whose time depends on the number of threads."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds, self.now = seconds, 0.0
        self.crew = Crew(lambda: self.now)
        self.used: list[int] = []

    def steps(self, count: int, most: int = 2, sequences: int = 1) -> list[int]:
        used = []
        for _ in range(count):
            used.append(self.crew.choose(most, sequences))
            self.now += self.seconds(used[-1])
            self.crew.done()
        self.used += used
        return used


IDLE = {1: 10e-3, 2: 5e-3}
BUSY = {1: 11e-3, 2: 14e-3}


def test_on_an_idle_machine_all_threads_decode_and_trials_become_rare() -> None:
    machine = Machine(IDLE.__getitem__)
    machine.steps(20_000)
    assert machine.used[:SOONEST] == [2] * SOONEST
    assert machine.used.count(1) % TRIAL == 0
    assert 0 < machine.used[-2 * LATEST :].count(1) <= 2 * TRIAL


def test_beside_a_busy_core_one_thread_fewer_decodes_soon_and_all_again_when_it_is_free() -> None:
    machine = Machine(BUSY.__getitem__)
    machine.steps(4 * SOONEST)
    busy = machine.steps(1000)
    assert busy.count(1) > 0.9 * len(busy)
    machine.seconds = IDLE.__getitem__
    machine.steps(10 * SOONEST)
    assert set(machine.steps(2 * SOONEST)) == {2}


def test_a_core_that_becomes_busy_in_a_long_answer_is_noticed_at_once() -> None:
    machine = Machine(IDLE.__getitem__)
    machine.steps(20_000)
    machine.seconds = BUSY.__getitem__
    machine.steps(2 * SOONEST)
    assert machine.steps(8 * SOONEST).count(1) >= 8 * SOONEST - 4 * TRIAL


def test_steps_that_grow_longer_with_the_context_change_nothing() -> None:
    machine = Machine(lambda parts: IDLE[parts] * (1 + machine.now / 10))
    used = machine.steps(3000)
    assert used.count(1) < 0.05 * len(used)


def test_steps_of_another_size_are_not_compared() -> None:
    machine = Machine(IDLE.__getitem__)
    for count in range(400):
        machine.seconds = (lambda parts: 8 * IDLE[parts]) if count % 2 else IDLE.__getitem__
        machine.steps(4, sequences=1 + count % 2)
    assert set(machine.used) == {2}


@pytest.mark.parametrize("most", [1, 2, 4])
def test_never_fewer_than_one_thread_and_never_more_than_there_are(most: int) -> None:
    machine = Machine(lambda parts: 1e-2 * parts)
    assert set(machine.steps(200, most=most)) == {most, max(most - 1, 1)}


def test_the_head_follows_the_step_only_shortly_after_it() -> None:
    machine = Machine(BUSY.__getitem__)
    machine.steps(6 * SOONEST)
    assert machine.crew.now(2) == 1
    assert machine.crew.now(4) == 4
    machine.now += 2 * VALID
    assert machine.crew.now(2) == 2
