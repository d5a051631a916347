"""The CCPE profiles of one backend: which there are, and what they say of a planned prompt.

In: profiles, or files and folders of them; plans. Out: the rows that are computed at canonical
positions. A task without a profile is computed as it always was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from cacheslide_agents.errors import DataError, RequestError
from cacheslide_agents.policies.base import Plan
from cacheslide_agents.position.profile import SUFFIX, CanonicalRows, Profile
from torch_cacheslide.fingerprint import fingerprint
from torch_cacheslide.models import LoadedModel

ProfilePaths = str | PathLike[str] | Sequence[str | PathLike[str]]
_COMPUTED_AS_PLANNED = ("cold", "hit", "partial")


@dataclass(frozen=True, slots=True)
class CopeModel:
    """What a profile must fit. `digest` is that of weights and config, in any precision."""

    digest: str
    layers: int
    heads: int
    npos: int

    @classmethod
    def of(cls, loaded: LoadedModel) -> CopeModel:
        """`RequestError` for a model whose positions are not contextual."""
        config = loaded.model.config
        if config.model_type != "cope_llama":
            raise RequestError(
                f"CCPE is for models with contextual positions (CoPE), which {loaded.model_id} is "
                "not; convert it with `cacheslide train`, or leave the profiles out"
            )
        digest = fingerprint(loaded.path, torch.float32)
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        return cls(digest, int(layers), int(heads), int(config.cope_npos))


class Profiles:
    """Profiles by task; `tasks` follows what is added. Used by the backend's worker thread; `add`
    may be called from any."""

    def __init__(self, loaded: LoadedModel, paths: ProfilePaths = ()) -> None:
        """Raises as `add` does, and `DataError` for a path that holds no profile."""
        self._loaded = loaded
        self._of: dict[str, Profile] = {}
        self.tasks = self._of.keys()
        for path in _files(paths):
            profile = Profile.read(path)
            if profile.task in self._of:
                raise DataError(f"{path}: another profile of task {profile.task!r} was given too")
            self.add(profile)

    @cached_property
    def model(self) -> CopeModel:
        """Looked at when the first profile comes: the digest reads weights. Raises as `of`."""
        return CopeModel.of(self._loaded)

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


def _files(paths: ProfilePaths) -> Iterable[Path]:
    for given in [paths] if isinstance(paths, (str, PathLike)) else paths:
        try:
            path = Path(given).expanduser()
        except RuntimeError as error:
            raise DataError(f"{given} is no path ({error}); name the file or folder") from error
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.glob(f"*{SUFFIX}"))
        if not found:
            raise DataError(
                f"{path} holds no CCPE profile (*{SUFFIX}); make one with `cacheslide calibrate`"
            )
        yield from found
