"""Progress as it is handed on, and the seconds of stages."""

import pytest

from quantkit.convert import progress
from quantkit.convert.progress import Progress, StageClock


def test_a_stage_that_comes_again_adds_to_its_seconds_and_listeners_hear_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([3.0, 4.0, 6.0, 9.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(times))
    heard: list[Progress] = []
    clock = StageClock(heard.append, started=1.0)
    clock(Progress("blocks", 0, 2))
    clock.begin("solve")
    clock(Progress("blocks", 1, 2))
    clock.begin("end")
    assert clock.seconds == {"plan": 2.0, "blocks": 4.0, "solve": 2.0}
    assert [one.done for one in heard] == [0, 1]
