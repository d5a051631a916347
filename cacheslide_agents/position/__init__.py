"""Where a token stands, and how its cached key is brought there."""

from cacheslide_agents.position.rotary import Rotary

__all__ = ["Rotary"]
