"""Reuse of moved KV caches for agents: chunks in, a receipt out."""

from cacheslide_agents.chunks import Chunk, ChunkedPrompt, Message, Role, Span

__all__ = ["Chunk", "ChunkedPrompt", "Message", "Role", "Span"]
