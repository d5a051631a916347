"""The fused kernels in triton's interpreter, against their formula written out in float64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheslide_agents.errors import RequestError
from cacheslide_agents.position.contextual import CanonicalMass, contextual_attention
from cacheslide_agents.position.kernels import fused_attention

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

WORKER = Path(__file__).parent / "support" / "kernel_worker.py"
SMALL = (16, 32, 16, 4, 1)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
Case = dict[str, Any]
Run = Callable[[Case], Tensor]
Mass = tuple[int, int, int, int, Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The kernel's output for a case, computed by the worker."""
    folder = tmp_path_factory.mktemp("kernels")
    worker = subprocess.Popen(
        [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdin
    assert worker.stdout

    def computed(case: Case) -> Tensor:
        assert worker.stdin
        assert worker.stdout
        path = folder / "case.pt"
        torch.save({"tiling": SMALL, **case}, path)
        print(path, file=worker.stdin, flush=True)
        said = worker.stdout.readline().strip()
        assert said == "done", said
        found: Tensor = torch.load(f"{path}.out")
        return found

    yield computed
    worker.kill()  # it has nothing left to do, and leaving takes it long
    worker.communicate()


def case(
    heads: int,
    kv_heads: int,
    keys: int,
    head_dim: int = 64,
    *,
    rows: list[int] | None = None,
    npos: int | None = 16,
    lean: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Random arguments; every key is a row unless `rows` are given; `lean` below 0 shuts gates."""
    generator = torch.Generator().manual_seed(1000 * heads + keys)
    wanted = torch.tensor(range(keys) if rows is None else rows, dtype=torch.int32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query, key = normal(heads, len(wanted), head_dim), normal(kv_heads, keys, head_dim)
    query[..., 0], key[..., 0] = head_dim**0.5, lean
    made = {"query": query, "key": key, "value": normal(kv_heads, keys, head_dim), "rows": wanted}
    embedding = None if npos is None else normal(heads, npos, head_dim) * 0.3
    return {**made, "scale": head_dim**-0.5, "embedding": embedding}


def formula(case: Case, masses: tuple[Mass, ...] = ()) -> Tensor:
    """Every row sees every key up to its own place; float64, all at once."""
    query, key, value = (case[name].double() for name in ("query", "key", "value"))
    groups, places = len(query) // len(key), torch.arange(key.shape[1])
    key, value = (each.repeat_interleave(groups, dim=0) for each in (key, value))
    seen = places <= case["rows"][:, None]
    scores = query @ key.transpose(1, 2) * case["scale"]
    logits = scores
    if case["embedding"] is not None:
        gates = scores.sigmoid() * seen
        for start, stop, first, last, mass in masses:
            inside = (places >= start) & (places < stop)
            total = (gates * inside).sum(-1, keepdim=True)
            wanted, most = mass.double()[:, None, None], case["embedding"].shape[1] - 1
            counting = ((case["rows"] >= first) & (case["rows"] < last))[:, None]
            counting = counting & ((wanted < most) | (total < most))
            gates = torch.where(inside & counting, gates * wanted / total, gates)
        most = case["embedding"].shape[1] - 1
        positions = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=most)
        table = query @ case["embedding"].double().transpose(1, 2)
        low = positions.long()
        below, above = table.gather(-1, low), table.gather(-1, (low + 1).clamp(max=most))
        logits = scores + below + (positions - low) * (above - below)
    attended: Tensor = torch.softmax(logits.masked_fill(~seen, -torch.inf), dim=-1) @ value
    return attended


def agree(found: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("npos", [16, None], ids=["contextual", "plain"])
def test_one_query_of_one_key_gets_its_value(run: Run, npos: int | None) -> None:
    given = case(1, 1, 1, npos=npos)
    torch.testing.assert_close(run(given), given["value"])


@pytest.mark.parametrize("npos", [16, None], ids=["contextual", "plain"])
@pytest.mark.parametrize("keys", [15, 16, 17, 33])
def test_rows_and_keys_at_the_edges_of_a_tile(run: Run, keys: int, npos: int | None) -> None:
    given = case(3, 1, keys, npos=npos)
    agree(run(given), formula(given))


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.bfloat16),
        (80, torch.float16),
        (96, torch.bfloat16),
        (128, torch.float16),
        (80, torch.float32),
        (128, torch.float32),
    ],
    ids=str,
)
def test_head_sizes_and_number_types(run: Run, head_dim: int, dtype: torch.dtype) -> None:
    given = case(2, 1, 40, head_dim, rows=[0, 17, 18, 39], dtype=dtype)
    found = run(given)
    assert found.dtype == dtype
    agree(found, formula(given))
    plain = {**given, "embedding": None}
    agree(run(plain), formula(plain))


@pytest.mark.parametrize(
    ("lean", "npos"),
    [(3.0, 4), (-6.0, 16), (0.0, 1), (0.0, 2), (0.0, 50)],
    ids=["soon", "never", "one position", "two", "not a power of two"],
)
def test_positions_that_saturate_soon_late_or_never(run: Run, lean: float, npos: int) -> None:
    given = case(2, 1, 100, rows=[3, 50, 98, 99], lean=lean, npos=npos)
    agree(run(given), formula(given))


def test_a_few_rows_far_apart_each_see_what_stands_before_them(run: Run) -> None:
    given = case(4, 2, 90, rows=[0, 1, 2, 40, 41, 89])
    agree(run(given), formula(given))


@pytest.mark.parametrize("npos", [16, None], ids=["contextual", "plain"])
def test_rows_of_minus_one_are_zero_and_disturb_nobody(run: Run, npos: int | None) -> None:
    given = case(2, 1, 40, rows=[5, -1, 21, 39, -1, -1], npos=npos)
    real = given["rows"] >= 0
    found = run(given)
    assert (found[:, ~real] == 0).all()
    kept = {**given, "query": given["query"][:, real], "rows": given["rows"][real]}
    agree(found[:, real], formula(kept))


@pytest.mark.parametrize("npos", [16, None], ids=["contextual", "plain"])
@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
def test_keys_may_lie_in_any_order_among_slots_of_others(
    run: Run, paged: bool, npos: int | None
) -> None:
    given = case(4, 2, 50, rows=[0, 30, 48, 49], npos=npos)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:50]
    scattered = dict(given, slots=slots.int())
    for name in ("key", "value"):
        room = torch.full((2, 64, 64), torch.nan)  # what is nobody's must never be read
        room[:, slots] = given[name]
        pages = room.view(2, 8, 8, 64).transpose(0, 1).contiguous()
        scattered[name] = pages if paged else room
    agree(run(scattered), formula(given))


def test_a_view_of_projections_is_read_where_it_lies(run: Run) -> None:
    given = case(3, 1, 20)
    viewed = {**given, "query": given["query"].transpose(0, 1).contiguous().transpose(0, 1)}
    agree(run(viewed), formula(given))


def test_canonical_masses_replace_what_the_gates_of_an_update_sum_to(run: Run) -> None:
    given = case(4, 2, 60, rows=[25, 39, 40, 55, 59], npos=40)
    masses = (
        (26, 38, 50, 60, torch.tensor([3.0, 0.5, 9.0, 4.0])),
        (20, 30, 40, 56, torch.tensor([1.0, 2.5, 0.0, 7.0])),
    )
    found = run({**given, "masses": masses})
    agree(found, formula(given, masses))
    agree(found[:, :2], formula(given)[:, :2])
    assert not torch.allclose(found[:, 3].double(), formula(given)[:, 3], atol=1e-3)
    query, key, value, embedding = (
        given[name].double() for name in ("query", "key", "value", "embedding")
    )
    torch_path = contextual_attention(
        query,
        key,
        value,
        embedding,
        given["rows"],
        scale=given["scale"],
        masses=[CanonicalMass(*mass[:4], mass[4].double()) for mass in masses],
    )
    agree(found, torch_path)


def test_a_mass_of_the_last_position_leaves_rows_that_count_more_as_they_are(run: Run) -> None:
    given = case(2, 1, 30, rows=[20, 29], npos=4, lean=1.0)
    masses = ((2, 19, 0, 30, torch.tensor([3.0, 1.0])),)
    found = run({**given, "masses": masses})
    agree(found[0], formula(given)[0])
    agree(found, formula(given, masses))


def test_a_mass_over_shut_gates_counts_nothing(run: Run) -> None:
    given = case(1, 1, 30, rows=[29])
    given["key"][:, 10:20] = -1e4 * given["query"][:, :1]
    masses = ((10, 20, 0, 30, torch.tensor([8.0])),)
    agree(run({**given, "masses": masses}), formula(given))


def test_the_tile_that_is_chosen_by_itself_gives_the_same(run: Run) -> None:
    given = case(1, 1, 150, 64, rows=list(range(70, 150)))
    agree(run({**given, "tiling": None}), formula(given))


def test_what_the_kernels_do_not_cover_is_refused_by_name() -> None:
    given = case(1, 1, 4, dtype=torch.float64)
    with pytest.raises(RequestError, match="float64"):
        fused_attention(**given)
