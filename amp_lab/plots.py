"""Static figures, one function a figure. Each returns a `Canvas`, which shows itself in a notebook."""

import torch

from .canvas import BLACK, Canvas, look, new_figure


def gallery(images: torch.Tensor, labels: torch.Tensor, classes: tuple[str, ...]) -> Canvas:
    """One picture of each class: `images` of shape (n, 1, height, width), `labels` of shape (n,)."""
    figure, axes = new_figure(9, 2.2, ncols=len(classes))
    for c, (ax, name) in enumerate(zip(axes, classes, strict=True)):
        ax.imshow(images[labels == c][0, 0].cpu(), cmap="gray_r")
        ax.set_title(name, fontsize=10)
        ax.set_axis_off()
    return Canvas(figure, f"{len(classes)} gray pictures, one of each class: {', '.join(classes)}.")


def relative_step_time(milliseconds: dict[str, float]) -> Canvas:
    """Bars: milliseconds a step by recipe, divided by those of "fp32"."""
    if "fp32" not in milliseconds:
        raise ValueError(
            f"relative_step_time: no 'fp32' to compare with, only {', '.join(milliseconds)}"
        )
    figure, ax = new_figure(8, 0.8 + 0.6 * len(milliseconds))
    for row, (name, ms) in enumerate(milliseconds.items()):
        ratio = ms / milliseconds["fp32"]
        ax.barh(row, ratio, color=look(name)["color"], height=0.6)
        ax.text(ratio + 0.02, row, f"{ratio:.2f}x   ({ms:.1f} ms)", va="center", fontsize=12)
    ax.axvline(1.0, color=BLACK, linestyle=":", linewidth=1)
    ax.set_yticks(range(len(milliseconds)), milliseconds, fontsize=12)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.35 * max(1.0, *(ms / milliseconds["fp32"] for ms in milliseconds.values())))
    ax.set_xlabel("time of one training step, FP32 = 1 (shorter is faster)")
    return Canvas(
        figure, f"Bars: time of one training step relative to FP32, for {', '.join(milliseconds)}."
    )
