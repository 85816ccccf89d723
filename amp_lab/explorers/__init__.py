"""Interactive panels: move something, see what it does."""

from .format_explorer import FormatExplorer
from .op_quiz import OpQuiz
from .panel import Panel
from .precision_race import PrecisionRace
from .scale_explorer import ScaleExplorer

__all__ = ["FormatExplorer", "OpQuiz", "Panel", "PrecisionRace", "ScaleExplorer"]
