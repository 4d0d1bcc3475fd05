"""Steps in flight behind one that failed: what they report once is not lost with them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from framework.batch import SchedulerOutput, StepOutput, Transfers
from framework.engine.core import EngineCore


class Recording:
    """A scheduler with a step to make as long as it is asked."""

    def __init__(self):
        self.num_made, self.updates = 0, []

    def has_work(self):
        return True

    def schedule(self):
        self.num_made += 1
        none = np.zeros(0, np.int32)
        return SchedulerOutput(self.num_made - 1, none, none, none, np.zeros(0, np.bool_), none)

    def update(self, scheduled, output):
        self.updates.append((scheduled.step_id, output.is_lost, output.connector))
        return []


class Failing:
    """Step 0 fails; the others bring the reports of a connector."""

    max_in_flight = 3

    def execute(self, scheduled):
        def result():
            if scheduled.step_id == 0:
                raise RuntimeError("step 0")
            none = np.zeros(0, np.int32)
            return StepOutput(none.reshape(0, 1), none, connector=Transfers([scheduled.step_id], [], []))

        return SimpleNamespace(result=result)


def test_reports_of_steps_behind_a_failed_one_are_passed_on():
    scheduler = Recording()
    core = EngineCore(scheduler, Failing(), SimpleNamespace(), 3)
    with pytest.raises(RuntimeError, match="step 0"):
        core.step()
    core.drop_steps()
    assert scheduler.updates == [
        (0, True, None),
        (1, True, Transfers([1], [], [])),
        (2, True, Transfers([2], [], [])),
    ]
