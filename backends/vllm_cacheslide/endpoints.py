"""vLLM's endpoint plugin: our routes on vLLM's own port, behind its own authentication.

In: vLLM's app and engine client. Out: `GET /v1/cacheslide/status`, `GET
/v1/cacheslide/receipts/{answer id}`, and the middleware that reads chunk plans. vLLM adds its
authentication after the plugins' middleware and so around it.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.renderers.chat_utils import load_chat_template

from cacheslide_agents.errors import CacheSlideError
from cacheslide_agents.policies import named
from cacheslide_agents.prompt.chat import ChatEncoder
from cacheslide_agents.prompt.wire_plan import PLAN_VERSION
from vllm_cacheslide.binding import Binding
from vllm_cacheslide.plugin import CONNECTOR, PLUGIN
from vllm_cacheslide.settings import Settings
from vllm_cacheslide.stamp import stamp_of_server
from vllm_cacheslide.stamping import STATE, Desk, Stamping

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient


class Endpoints:
    """Entry point of group `vllm.endpoint_plugins`; loaded if `VLLM_PLUGINS` names it."""

    name = PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route("/v1/cacheslide/status", status, methods=["GET"])
        app.add_api_route("/v1/cacheslide/receipts/{answer_id:path}", receipt, methods=["GET"])
        app.add_middleware(Stamping)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        transfer = engine_client.vllm_config.kv_transfer_config if engine_client else None
        if engine_client is None or transfer is None or transfer.kv_connector != CONNECTOR:
            return
        settings = Settings.of(transfer.kv_connector_extra_config)
        window = engine_client.vllm_config.model_config.max_model_len
        encoder = _encoder(engine_client.renderer.get_tokenizer(), args)
        binding = Binding(encoder, named(settings.policy), window)
        desk = Desk(binding, stamp_of_server(), settings.tenant_header.lower())
        setattr(state, STATE, desk)


async def status(request: Request) -> JSONResponse:
    """Which plans are read, and why nothing is reused; empty when it is."""
    off = "the engine runs without the connector"
    if getattr(request.app.state, STATE, None) is not None:
        off = (await _asked(request, "cacheslide_off")) or ""
    return JSONResponse({"plan_versions": [PLAN_VERSION], "off": off})


async def receipt(request: Request, answer_id: str) -> JSONResponse:
    """The receipt of an answer to the same tenant; 404 for all others."""
    desk: Desk | None = getattr(request.app.state, STATE, None)
    found: dict[str, Any] | None = None
    if desk is not None:
        name = desk.receipt_id(desk.tenant_of(request.headers), answer_id)
        found = await _asked(request, "cacheslide_receipt", name)
    if found is None:
        return JSONResponse({"error": f"no receipt for {answer_id:.100}"}, status_code=404)
    return JSONResponse({**found, "request_id": answer_id})


async def _asked(request: Request, method: str, *args: object) -> Any:
    """The first answer of the engine's workers that is not empty; with TP all say the same."""
    answers = await request.app.state.engine_client.collective_rpc(method, args=args)
    return next(filter(None, answers), None)


def _encoder(tokenizer: Any, args: Namespace) -> ChatEncoder | str:
    try:
        return ChatEncoder(tokenizer, chat_template=load_chat_template(args.chat_template))
    except CacheSlideError as error:
        return str(error)
