"""Options of the torch backend: one of the wrong kind is refused before a model is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.errors import RequestError
from torch_cacheslide import TorchBackend
from torch_cacheslide.options import checked


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("device", 5, "'cpu', 'cuda' or None"),
        ("dtype", ["float32"], "a name such as"),
        ("threads", True, "a whole number or None"),
        ("threads", 1.5, "a whole number or None"),
        ("policy", "cacheslide", "one of cacheslide_agents.policies"),
        ("store", 5, "a PageStore or None"),
        ("store_bytes", 1.5, "a whole number of bytes"),
        ("store_bytes", True, "a whole number of bytes"),
        ("store_bytes", float("inf"), "a whole number of bytes"),
        ("store_bytes", "4", "a whole number of bytes"),
        ("disk_bytes", None, "a whole number of bytes"),
        ("prefetch", "abc", "a whole number of layers or None"),
        ("prefetch", [1], "a whole number of layers or None"),
        ("prefetch", False, "a whole number of layers or None"),
        ("decoupling", None, "a bool, 'off', 'late' or 'slots'"),
        ("refresh", True, "'corrected' or 'never'"),
        ("guard_every", True, "a whole number of reuses or None"),
        ("guard_every", 2.0, "a whole number of reuses or None"),
        ("guard_every", float("inf"), "a whole number of reuses or None"),
        ("guard_budget", "0.1", "a number of nats"),
        ("kernels", "maybe", "a bool"),
        ("profiles", 5, "a file or folder, or a list of them"),
        ("profiles", [5], "a file or folder, or a list of them"),
    ],
)
def test_an_option_of_the_wrong_kind_is_named_with_what_it_takes(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(RequestError) as caught:
        TorchBackend("never looked for", **{name: value})
    assert str(caught.value).startswith(f"{name}={value!r} must be {allowed}")


@pytest.mark.parametrize("path", ["", 5, "a\0b"])
def test_a_store_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(RequestError, match=r"^store_path="):
        TorchBackend("never looked for", store_path=path)


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("store_bytes", 4e9, 4_000_000_000),
        ("store_bytes", np.int64(5), 5),
        ("disk_bytes", np.float64(2e9), 2_000_000_000),
        ("threads", np.int64(2), 2),
        ("prefetch", np.int32(1), 1),
        ("guard_every", np.uint8(3), 3),
        ("guard_budget", np.float32(0.5), 0.5),
        ("guard_budget", 1, 1),
        ("threads", None, None),
        ("decoupling", True, True),
    ],
)
def test_numbers_of_any_kind_reach_the_backend_as_pythons_own(
    name: str, value: Any, plain: Any
) -> None:
    told: dict[str, Any] = {}

    @checked
    def make(**options: Any) -> None:
        told.update(options)

    make(**{name: value})
    assert told == {name: plain}
    assert type(told[name]) is type(plain)


def test_a_backend_is_made_with_numbers_of_numpy(tiny_model: str) -> None:
    numbers: dict[str, Any] = {
        "store_bytes": 2.0**24,
        "threads": np.int64(torch.get_num_threads()),
        "prefetch": np.int64(1),
        "guard_every": np.int64(3),
        "guard_budget": np.float32(0.5),
    }
    TorchBackend(tiny_model, device="cpu", **numbers).close()
