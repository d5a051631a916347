"""Which layers of a model attend to less than all that stands before them.

In: a transformers config. Out: the kinds of such layers, by transformers' names.
"""

from __future__ import annotations

from typing import Any

FULL, WINDOWED = "full_attention", "sliding_attention"


def restricted_layers(config: Any) -> set[str]:
    """What `layer_types` names besides full attention; without it, whether a window is in use.

    A window may be as wide as the context, and then hides nothing.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) - {FULL}
    window = getattr(config, "sliding_window", None)
    used = window is not None and getattr(config, "use_sliding_window", True)
    return {WINDOWED} if used else set()
