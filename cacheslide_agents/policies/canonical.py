"""The CCPE profiles of one backend: which there are, and what they say of a planned prompt.

In: profiles, or files and folders of them; plans. Out: the rows that are computed at canonical
positions. A task without a profile is computed as it always was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from cacheslide_agents.errors import DataError, RequestError
from cacheslide_agents.paths import expanded
from cacheslide_agents.policies.base import Plan
from cacheslide_agents.position.profile import SUFFIX, CanonicalRows, Profile

ProfilePaths = str | PathLike[str] | Sequence[str | PathLike[str]]
_COMPUTED_AS_PLANNED = ("cold", "hit", "partial")


@dataclass(frozen=True, slots=True)
class CopeModel:
    """What a profile must fit. `digest` is that of weights and config, in any precision."""

    digest: str
    layers: int
    heads: int
    npos: int


def refuse_model(name: str) -> NoReturn:
    """Model `name` has no contextual positions, and so no use for a profile."""
    raise RequestError(
        f"CCPE is for models with contextual positions (CoPE), which {name} is not; convert it "
        "with `cacheslide train`, or leave the profiles out"
    )


class Profiles:
    """Profiles by task; `tasks` follows what is added. Used by the backend's worker thread; `add`
    may be called from any.

    `model` is asked for when the first profile comes: a digest reads weights.
    """

    def __init__(self, model: Callable[[], CopeModel], paths: ProfilePaths = ()) -> None:
        """Raises as `add` does, and `DataError` for a path that holds no profile, `RequestError`
        for one that cannot be a path.
        """
        self._model = model
        self._of: dict[str, Profile] = {}
        self.tasks = self._of.keys()
        for path in _files(paths):
            profile = Profile.read(path)
            if profile.task in self._of:
                raise DataError(f"{path}: another profile of task {profile.task!r} was given too")
            self.add(profile)

    @cached_property
    def model(self) -> CopeModel:
        """What `model` answered."""
        return self._model()

    def add(self, profile: Profile) -> None:
        """Use `profile` from now on. `ModelLoadError` if it is another model's."""
        model = self.model
        profile.check(model.digest, model.layers, model.heads, model.npos)
        self._of[profile.task] = profile

    def place(self, plan: Plan, task: str, device: torch.device) -> CanonicalRows | None:
        """The rows of `plan` that are computed for the first time, at canonical positions.

        Not those of chunks that are recomputed, nor correction rows, nor the last token, which
        every turn computes anew; and none at all where the prompt is to be answered exactly.
        """
        profile = self._of.get(task)
        if profile is None or not plan.policy.ccpe or plan.outcome not in _COMPUTED_AS_PLANNED:
            return None
        fresh = ~plan.hit
        fresh[-1] = False
        return profile.place(plan.spans, fresh, device)


def still_exact(plan: Plan, canonical: CanonicalRows) -> npt.NDArray[np.bool_]:
    """[n]: what of `plan` is exact all the same: tokens before the first of `canonical`'s rows."""
    return plan.exact & (np.arange(len(plan.exact)) < canonical.first)


def profile_paths(given: ProfilePaths) -> Sequence[str | PathLike[str]]:
    """One path is as good as several; `RequestError` for what is neither."""
    paths = [given] if isinstance(given, (str, PathLike)) else given
    if not isinstance(paths, Sequence) or not all(isinstance(p, (str, PathLike)) for p in paths):
        raise RequestError(f"profiles={given!r} must be a file or folder, or a list of them")
    return paths


def _files(paths: ProfilePaths) -> Iterable[Path]:
    for given in profile_paths(paths):
        path = expanded(given, "profiles")
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.glob(f"*{SUFFIX}"))
        if not found:
            raise DataError(
                f"{path} holds no CCPE profile (*{SUFFIX}); make one with `cacheslide calibrate`"
            )
        yield from found
