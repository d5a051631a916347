"""The adapter that comes with the package: small, whole, and near its base on unseen text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_cacheslide import locate as places
from torch_cacheslide.adapter import WEIGHTS, Adapter
from torch_cacheslide.models import load_model

NAME = "smollm2-135m-cope"
TEXT = (
    "The harbour town lies where the river meets the sea. Its oldest street follows the quay, "
    "and the houses along it were built by merchants who traded in salt, timber and wool. A "
    "fire in the autumn of 1823 destroyed the northern half of the town; the church and the "
    "customs house survived because the wind turned before morning. After the fire the "
    "council decided that every new house must be built of stone, which is why the northern "
    "streets look so different from the southern ones today. The railway came late, in 1891, "
    "and the line was closed again after seventy years, but the station has been kept as a "
    "museum. Visitors usually start there, walk along the quay to the church, and end the day "
    "at the old lighthouse, from which one can see the islands when the weather is clear."
)


def test_the_adapter_is_small_and_its_name_is_an_alias() -> None:
    assert (places.ADAPTERS / NAME / WEIGHTS).stat().st_size < 12_000_000
    assert NAME in places.aliases()
    assert Adapter.read(places.ADAPTERS / NAME).base == "smollm2-135m"


def test_the_converted_model_predicts_unseen_text_nearly_as_well_as_its_base() -> None:
    base, converted = load_model("smollm2-135m"), load_model(NAME)
    ids = torch.tensor(base.tokenizer(TEXT)["input_ids"])[None]
    losses = []
    for loaded in (base, converted):
        model: Any = loaded.model
        with torch.inference_mode():
            losses.append(float(model(ids, labels=ids).loss))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert converted.model.config.model_type == "cope_llama"
