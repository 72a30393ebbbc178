"""The models of bench/packing.py are those that their papers describe."""

from __future__ import annotations

import pytest
import torch

from bench.packed_models import ACTIVATIONS, MODELS

PUBLISHED = {"mobilenet": 4_231_976, "resnet50": 25_557_032, "densenet121": 7_978_856}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name](1000, 224)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [32, 224])
def test_a_model_takes_images_of_both_sizes_and_the_activation_that_it_is_given(name: str, size: int) -> None:
    with torch.device("meta"):
        model = MODELS[name](10, size, ACTIVATIONS["tanh"])
        assert model(torch.empty(2, 3, size, size)).shape == (2, 10)
    kinds = {type(module) for module in model.modules()}
    assert torch.nn.Tanh in kinds
    assert torch.nn.ReLU not in kinds
