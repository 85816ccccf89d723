"""What all explorers have in common: controls, one picture, one line of text."""

import ipywidgets as widgets

from ..canvas import Canvas


class Panel(widgets.VBox):
    """Controls above a line of text and a picture, with a static picture where widgets cannot run.

    An explorer passes its `canvas` and its `controls`, lets them `observe`, and calls
    `show(sentence)` after each change. The sentence says what the picture shows.
    """

    def __init__(self, canvas: Canvas, controls: list[widgets.Widget]):
        self.canvas = canvas
        self.readout = widgets.HTML()
        width = round(canvas.figure.get_figwidth() * canvas.figure.dpi)
        layout = widgets.Layout(width=f"{width}px", max_width="100%", object_fit="contain")
        self.picture = widgets.Image(format="png", layout=layout)
        super().__init__([*controls, self.readout, self.picture])

    def show(self, sentence: str) -> None:
        """Redraw the picture, and say in words what it shows."""
        self.readout.value = sentence
        self.picture.value = self.canvas.png()

    def __repr__(self):
        return self.canvas.alt

    def _repr_mimebundle_(self, **kwargs):
        static, metadata = self.canvas._repr_mimebundle_()
        return super()._repr_mimebundle_(**kwargs) | static, metadata
