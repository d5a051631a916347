"""The scheduler's side: plans requests when they arrive, orders prefills and keeps, step by step.

In: vLLM's requests, some with an annotation. Out: how many tokens the workers will provide, and the
orders that say how. Plans are made here because salting is due when a request arrives, and because
every rank must follow the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheslide_agents.errors import CacheSlideError, RequestError
from cacheslide_agents.pages.base import StoredContext
from vllm_cacheslide.guard import log
from vllm_cacheslide.orders import Keep, Note, Prefill, StepOrders, StepResults
from vllm_cacheslide.planning import (
    Planned,
    Planning,
    ids_of,
    left_to_vllm,
    new_salt,
    wants_prompt_logprobs,
)
from vllm_cacheslide.stamp import expect_stamp
from vllm_cacheslide.wire import PARAMETER, Annotation

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Scheduling:
    """State of the scheduler's side; all methods are called by one thread.

    At most `step_rows` tokens are computed by us in one step (or one request, if it is longer): our
    work is not in vLLM's token budget, and other requests wait for it. With a `stamp`, annotations
    that do not bear it are ignored: a client wrote them.
    """

    def __init__(self, planning: Planning, step_rows: int, stamp: str = "") -> None:
        self._planning, self._step_rows, self._stamp = planning, step_rows, stamp
        self._planned: dict[str, Planned] = {}
        self._rows = 0
        self._keeps: list[Keep] = []
        self._prefills: list[Prefill] = []
        self._notes: list[Note] = []
        self._ended: list[str] = []
        self._restored: dict[str, int] | None = None

    def restore(self, found: Mapping[str, StoredContext]) -> None:
        """Contexts, by name, that every rank's store has had from before; the oldest first."""
        directory = self._planning.directory
        self._restored = {name: directory.add(context) for name, context in found.items()}

    def arrived(self, request: Request) -> None:
        """Plan an annotated request, and keep its blocks apart: from other namespaces, and from
        everybody if they will not be exact or if its namespace cannot be told."""
        params = request.kv_transfer_params
        if not params or PARAMETER not in params:
            return
        try:
            expect_stamp(params, self._stamp)
        except RequestError as error:
            log.warning("request %a: annotation ignored: %s", request.request_id, error)
            return
        try:
            planned, salt = self._planned_and_salt(request, params)
        except Exception as error:
            _salt(request, new_salt())
            unforeseen = not isinstance(error, CacheSlideError)
            message = "request %a: left to vLLM, its blocks for itself: %s"
            log.warning(message, request.request_id, error, exc_info=unforeseen)
            return
        _salt(request, salt)
        self._planned[request.request_id] = planned

    def matched(self, request: Request, local: int) -> int | None:
        """Tokens beyond `local` that our workers provide; `None`: ask again in the next step."""
        planned = self._planned.get(request.request_id)
        if planned is None:
            return 0
        if planned.takes_over(local) and self._is_stale(planned):
            planned = self._planned[request.request_id] = self._again(request, planned)
        planned.start = local
        if wants_prompt_logprobs(request) or not planned.takes_over(local):
            return 0
        if self._rows and self._rows + planned.rows(local) > self._step_rows:
            return None
        return planned.length - 1 - local

    def admitted(self, request: Request, blocks: Sequence[int], provided: int) -> None:
        """vLLM has given the request its blocks: it runs in this step."""
        planned = self._planned.get(request.request_id)
        if planned is None:
            return
        if provided:
            self._rows += planned.rows(planned.start)
            self._prefills.append(
                Prefill(
                    planned.order(request),
                    tuple(blocks),
                    planned.start,
                    planned.edits,
                    planned.canonical,
                )
            )
        elif not planned.ordered:
            if planned.takes_over(planned.start):
                planned.plan, planned.sources = left_to_vllm(request, planned.plan), ()
                planned.canonical = None
            self._notes.append(Note(planned.order(request), planned.start))
        planned.ordered = True

    def finished(self, request: Request, blocks: Sequence[int]) -> bool:
        """True when the workers are to read the blocks before they are freed."""
        planned = self._planned.pop(request.request_id, None)
        if planned is None:
            return False
        self._ended.append(request.request_id)
        context = self._planning.left_behind(request, planned)
        if context is None:
            return False
        number = self._planning.directory.add(context)
        self._keeps.append(Keep(planned.order(request), number, context, tuple(blocks)))
        return True

    def not_to_retain(self, request: Request, blocks: Sequence[int], block_size: int) -> set[int]:
        """Blocks that vLLM's prefix cache must forget: new ones of a prompt not to be retained.

        Call it before `finished`.
        """
        planned = self._planned.get(request.request_id)
        if planned is None or planned.annotation.retain or planned.salt is not None:
            return set()
        return set(blocks[planned.start // block_size :])

    def take_orders(self) -> StepOrders:
        """What was decided since the last step."""
        orders = StepOrders(
            tuple(self._keeps),
            tuple(self._prefills),
            tuple(self._notes),
            tuple(self._ended),
            restored=self._restored,
        )
        self._restored = None
        self._keeps, self._prefills, self._notes, self._ended = [], [], [], []
        self._rows = 0
        return orders

    def learn(self, results: StepResults) -> None:
        """What the workers reported."""
        self._planning.directory.remove(results.lost)
        for work, seconds in results.observed:
            self._planning.cost.observe(work, seconds)
        self._planning.off = self._planning.off or results.off

    def _planned_and_salt(
        self, request: Request, params: Mapping[str, Any]
    ) -> tuple[Planned, str | None]:
        """`RequestError` for an annotation that cannot be read or has no token ids to be about."""
        if request.prompt_token_ids is None:
            raise RequestError("its prompt is not in token ids")
        annotation = Annotation.from_params(params).bound_to(request.prompt_token_ids)
        planned = self._sibling(request, annotation) or self._planning.plan(request, annotation)
        return planned, planned.salt or self._salt_of_namespace(request, annotation)

    def _is_stale(self, planned: Planned) -> bool:
        """What it was planned on has left since: its session's next context came first, say."""
        return not (planned.ordered or self._planning.directory.has(planned.sources))

    def _again(self, request: Request, planned: Planned) -> Planned:
        """A plan on what there is now. A salt stays: siblings' blocks may stand under it."""
        again = self._planning.plan(request, planned.annotation)
        again.plan_s, again.keeper = again.plan_s + planned.plan_s, planned.keeper
        if planned.salt is not None:
            again.salt = planned.salt
        elif again.salt is not None:  # vLLM has nothing of it, so no hash was looked up with use
            _salt(request, again.salt)
        return again

    def _salt_of_namespace(self, request: Request, annotation: Annotation) -> str | None:
        """Keeps the request's own salt. The default namespace shares with requests of vLLM's own.

        Made with the stamp, so that no client can name another's.
        """
        if (name := annotation.namespace) == "default":
            return None
        text = f"{len(name)} {name}{request.cache_salt or ''}".encode("utf-8", "surrogatepass")
        return f"cacheslide-{blake2b(text, key=self._stamp.encode()[:64]).hexdigest()}"

    def _sibling(self, request: Request, annotation: Annotation) -> Planned | None:
        """Another answer to the same prompt is under way: same plan, same blocks."""
        for other in self._planned.values():
            same = np.array_equal(other.plan.ids, ids_of(request))
            if same and other.annotation == annotation:
                return replace(other, keeper=False, start=0, ordered=False)
        return None


def _salt(request: Request, salt: str | None) -> None:
    """vLLM finds blocks of the same salt only."""
    if salt is not None:
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
