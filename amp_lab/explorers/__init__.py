"""Interactive panels: move something, see what it does."""

from .panel import Panel

__all__ = ["Panel"]
