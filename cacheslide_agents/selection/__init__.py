"""Which reused tokens are recomputed all the same, and what becomes of their new K and V."""

from cacheslide_agents.selection.affinity import Affinity, Score
from cacheslide_agents.selection.base import LayerSelector, SelectionView, Selector
from cacheslide_agents.selection.boundary import Boundary
from cacheslide_agents.selection.cosine import KeyCosine
from cacheslide_agents.selection.deviation import KeyDeviation
from cacheslide_agents.selection.fixed import Everything, Fixed
from cacheslide_agents.selection.fusion import Fusion, PaperFusion, Replace
from cacheslide_agents.selection.gate import CkSimGate, Gate
from cacheslide_agents.selection.overlap import TokenOverlap
from cacheslide_agents.selection.removal import AfterRemoval
from cacheslide_agents.selection.tail import Tail
from cacheslide_agents.selection.union import Union

__all__ = [
    "Affinity",
    "AfterRemoval",
    "Boundary",
    "CkSimGate",
    "Everything",
    "Fixed",
    "Fusion",
    "Gate",
    "KeyCosine",
    "KeyDeviation",
    "LayerSelector",
    "PaperFusion",
    "Replace",
    "Score",
    "SelectionView",
    "Selector",
    "Tail",
    "TokenOverlap",
    "Union",
]
