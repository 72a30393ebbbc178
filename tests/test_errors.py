"""The errors of a user's code, as they are shown."""

import pytest
import torch

import penstock as ps
from tests.tasks import Blobs


class Misspelt(Blobs):
    def model(self, config):
        return torch.nn.Linear(2, config["width"])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_traceback_begins_with_the_users_own_code(workers):
    study = ps.Study(Misspelt(), {"lr": ps.uniform(0, 1)}, metric="loss", algorithm=ps.Random(budget=1), trials=2)
    with pytest.raises(ps.TaskError) as raised:
        study.run(workers=workers, progress=False)
    said = str(raised.value).splitlines()
    assert said[0].startswith("The task failed in a dry batch")
    assert said[1] == "Traceback (most recent call last):"
    assert said[2].endswith(", in model")
    assert said[-1] == "KeyError: 'width'"
    assert len([line for line in said if line.startswith("  File ")]) == 1
