"""Interactive panels: move something, see what it does."""

from .format_explorer import FormatExplorer
from .panel import Panel

__all__ = ["FormatExplorer", "Panel"]
