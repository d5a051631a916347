"""Which reused tokens a draft plan computes all the same: its policy's selector, asked.

In: a draft, its match, the store and the backend's probe. Out: the finished `Plan`. A selector that
fails or answers nonsense is a `ReuseError`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cacheslide_agents.errors import ReuseError
from cacheslide_agents.policies.base import ContextSource, Plan, Probe
from cacheslide_agents.policies.draft import exact_mask
from cacheslide_agents.policies.keys import Keys
from cacheslide_agents.policies.match import Match
from cacheslide_agents.selection.base import Positions, SelectionView, Selector


def correct(draft: Plan, match: Match, store: ContextSource, probe: Probe | None) -> Plan:
    """`draft` itself where nothing can be corrected: no selector, or no hit after a change."""
    selector = draft.policy.selector
    if selector is None or not draft.runs:
        return draft
    keys = Keys(draft, match, store, probe)
    view = _view(draft, match, keys)
    if not len(view.candidates):
        return draft
    if not isinstance(selector, Selector):
        budget = selector.budget(len(view.candidates))
        return replace(draft, narrow=selector, view=view) if budget > 0 else draft
    chosen = _checked(selector.select(view), draft.hit)
    active = draft.active.copy()
    active[chosen] = True
    plan = replace(draft, active=active, probe_layer_tokens=keys.probed_layer_tokens)
    return replace(plan, exact=exact_mask(plan))


def _view(draft: Plan, match: Match, keys: Keys) -> SelectionView:
    source = match.source
    view = SelectionView(
        ids=draft.ids,
        cached_ids=np.zeros(0, dtype=np.int64) if source is None else source.ids,
        runs=tuple(planned.run for planned in match.runs),
        edits=match.edits,
        cached_keys=lambda layer: keys.cached(view.candidates, layer),
        removed_keys=keys.removed,
        new_keys=keys.new,
    )
    return view


def _checked(chosen: Positions, hit: npt.NDArray[np.bool_]) -> Positions:
    """`chosen`, if all of it are hit positions."""
    positions = np.asarray(chosen)
    if positions.ndim != 1 or (len(positions) and positions.dtype.kind not in "iu"):
        raise ReuseError(f"the selector gave {positions.dtype} {positions.shape}, not positions")
    inside = positions[(positions >= 0) & (positions < len(hit))]
    if len(inside) < len(positions) or not hit[inside].all():
        raise ReuseError("the selector chose tokens that are not reused; it may only choose hits")
    return positions.astype(np.int64)
