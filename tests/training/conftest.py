"""What the tests of several files begin with."""

import pytest
import torch


@pytest.fixture(scope="module")
def in_float64():
    """What a trial alone and one of many have in common is not lost in rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
