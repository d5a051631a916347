"""Options of the torch backend: one of the wrong kind is refused before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from cacheslide_agents.errors import RequestError
from torch_cacheslide import TorchBackend


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("device", 5, "'cpu', 'cuda' or None"),
        ("dtype", ["float32"], "a name such as"),
        ("threads", True, "a whole number or None"),
        ("threads", 1.5, "a whole number or None"),
        ("policy", "cacheslide", "one of cacheslide_agents.policies"),
        ("store", 5, "a PageStore or None"),
        ("store_bytes", 1e9, "a whole number of bytes"),
        ("store_bytes", True, "a whole number of bytes"),
        ("disk_bytes", None, "a whole number of bytes"),
        ("prefetch", "abc", "a whole number of layers or None"),
        ("prefetch", [1], "a whole number of layers or None"),
        ("prefetch", False, "a whole number of layers or None"),
        ("decoupling", None, "a bool, 'off', 'late' or 'slots'"),
        ("refresh", True, "'corrected' or 'never'"),
        ("guard_every", True, "a whole number of reuses or None"),
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
