"""The same model, trained in four precisions at once, while you turn the knobs."""

import asyncio
import html
import math
import threading
import time
from collections.abc import Callable, Iterable

import ipywidgets as widgets
import torch
import torch.nn.functional as F
from torch import nn

from ..canvas import LOOKS, RED, Canvas, new_figure
from ..datasets import batches, fashion_mnist
from ..training import RECIPES, Step, train
from .panel import Panel

ENTRANTS = ("fp32", "fp16 (no scaling)", "fp16 + GradScaler", "bf16")
SCALED = "fp16 + GradScaler"
SCALES = {f"2^{power}": 2.0**power for power in range(41)}
SMOOTHING = 0.8  # the share of the previous value in the curves' moving average
DRAWING = 0.05  # the share of the time that goes into drawing, at most


def deep_classifier(layers: int = 16, width: int = 128) -> nn.Sequential:
    """A plain network for Fashion-MNIST: `layers` hidden layers with ReLU, and nothing else.

    Input: float of shape (n, 1, 28, 28). Output: logits of shape (n, 10). With PyTorch's default
    weights each layer passes back some 0.4 of the gradient that it gets, so that the first layers
    see very little of it.

    Source: He, Zhang, Ren, Sun, "Delving Deep into Rectifiers", ICCV 2015, section 2.2.
    """
    hidden = [nn.Linear(28 * 28, width), nn.ReLU()]
    for _ in range(layers - 1):
        hidden += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


class PrecisionRace(Panel):
    """Train one model in FP32, FP16 without scaling, FP16 with a GradScaler and BF16, in turn.

    All four start from the same weights and see the same batches. `play` trains beside whatever else
    the notebook does, `pause` stops, `step` lets each precision make one step, `reset` starts again.
    `learning_rate` and `loss_scale` take effect at once, and are what the next reset begins with. A
    cell can do all that, too: `race.play.click()`, `race.learning_rate.value = 0.01`.
    `race.run(steps=40)` trains in the calling cell and returns when it is done.

    `history` holds the `Step`s of each precision, `models` the four networks, `error` the exception
    that stopped the race, or None.

    `make_model` returns a new model for `device`. `make_batches` returns an iterable of (input,
    target) on `device`, and must begin with the same batches each time. The default is
    `deep_classifier` on Fashion-MNIST. The optimizer is AdamW. The scale grows after
    `growth_interval` good steps: PyTorch's default of 2000 would be too slow to watch.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        make_model: Callable[[], nn.Module] = deep_classifier,
        make_batches: Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]] | None = None,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy,
        learning_rate: float = 1e-3,
        loss_scale: float = 2.0**16,
        growth_interval: int = 50,
        seed: int = 0,
    ):
        if not 1e-6 <= learning_rate <= 10:
            raise ValueError(
                f"PrecisionRace: learning_rate is {learning_rate}, expected 1e-6 to 10"
            )
        if loss_scale not in SCALES.values():
            raise ValueError(
                f"PrecisionRace: loss_scale is {loss_scale}, expected a power of two from 1 to 2**40"
            )
        if make_batches is None:
            images = fashion_mnist(device).train
            make_batches = lambda: batches(images, size=128, steps=2000)  # noqa: E731
        self.device = torch.device(device)
        self._make_model = make_model
        self._make_batches = make_batches
        self._loss_fn = loss_fn
        self._growth_interval = growth_interval
        self._seed = seed
        # Buttons, sliders and cells may speak from different threads: one step at a time.
        self._lock = threading.RLock()
        self._task = None
        self._playing = False
        self._start_clock()

        self.play = _button("play", "train until paused")
        self.pause = _button("pause", "let other cells have the processor", disabled=True)
        self.step = _button("step-forward", "one step in each precision", description="step")
        self.reset = _button("undo", "back to the first weights", description="reset")
        wide = {"style": {"description_width": "110px"}, "layout": widgets.Layout(width="440px")}
        self.learning_rate = widgets.FloatLogSlider(
            learning_rate,
            base=10,
            min=-6,
            max=1,
            step=0.25,
            description="learning rate",
            readout_format=".1e",
            **wide,
        )
        self.loss_scale = widgets.SelectionSlider(
            options=SCALES.items(), value=loss_scale, description="loss scale", **wide
        )
        buttons = widgets.HBox([self.play, self.pause, self.step, self.reset])
        super().__init__(_RaceChart(), [buttons, self.learning_rate, self.loss_scale])

        self.play.on_click(lambda _: self._on_play())
        self.pause.on_click(lambda _: self._stop())
        self.step.on_click(lambda _: self._on_step())
        self.reset.on_click(lambda _: self._on_reset())
        self.learning_rate.observe(lambda _: self._set_learning_rate(), "value")
        self.loss_scale.observe(lambda _: self._set_loss_scale(), "value")
        self._on_reset()

    def run(self, steps: int = 40) -> None:
        """Let each precision make `steps` steps now, and return when they are done.

        An exception in a step stops the race, is shown in the panel, and raised.
        """
        if steps < 1:
            raise ValueError(f"run: steps is {steps}, expected 1 or more")
        self._stop()
        self._start_clock()
        try:
            for _ in range(steps * len(ENTRANTS)):
                if not self._advance():
                    break
        finally:
            self._draw()
        if self.error is not None:
            raise self.error

    # ---- what the buttons do -------------------------------------------------------------------

    def _on_play(self):
        if self._playing:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.readout.value = (
                "<b>Nothing started.</b> Play needs a notebook; elsewhere use run(steps=40)."
            )
            return
        self._set_playing(True)
        self._start_clock()
        self._task = loop.create_task(self._train())

    async def _train(self):
        """One training step, then everybody else's turn: so the kernel stays responsive."""
        try:
            while self._playing and self._advance():
                await asyncio.sleep(0)
        except KeyboardInterrupt:
            pass  # the stop button, while a step ran: the same as pause
        self._stop()

    def _on_step(self):
        self._stop()
        for _ in ENTRANTS:
            self._advance()
        self._draw()

    def _stop(self):
        if self._playing:
            self._set_playing(False)
            self._draw()

    def _set_playing(self, playing):
        self._playing = playing
        self.play.disabled, self.pause.disabled = playing, not playing

    def _on_reset(self):
        self._stop()
        with self._lock:
            self._start()
        self._draw()

    def _set_learning_rate(self):
        with self._lock:
            for optimizer in self._optimizers.values():
                for group in optimizer.param_groups:
                    group["lr"] = self.learning_rate.value

    def _set_loss_scale(self):
        with self._lock:
            scale = {"scale": self.loss_scale.value}
            self._scaler.load_state_dict(self._scaler.state_dict() | scale)

    # ---- training ------------------------------------------------------------------------------

    def _start(self):
        self.models, self._optimizers = {}, {}
        gpus = [self.device] if self.device.type == "cuda" else []
        for name in ENTRANTS:
            with torch.random.fork_rng(gpus):
                torch.manual_seed(self._seed)
                self.models[name] = self._make_model().to(self.device)
            self._optimizers[name] = torch.optim.AdamW(
                self.models[name].parameters(), lr=self.learning_rate.value
            )
        self._scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=self.loss_scale.value,
            growth_interval=self._growth_interval,
        )
        self.history: dict[str, list[Step]] = {name: [] for name in ENTRANTS}
        self.error = None
        self.finished = False
        self._batches = {name: iter(self._make_batches()) for name in ENTRANTS}
        self.canvas.clear()

    def _advance(self) -> bool:
        """Train one step in the precision whose turn it is. False if the race is over."""
        with self._lock:
            if self.error is not None or self.finished:
                return False
            name = min(ENTRANTS, key=lambda name: len(self.history[name]))
            try:
                batch = next(self._batches[name], None)
                if batch is None:
                    self.finished = True
                    return False
                scaler = self._scaler if name == SCALED else None
                arguments = RECIPES[name], self._optimizers[name], self._loss_fn, scaler
                for step in train(self.models[name], [batch], *arguments):
                    self.history[name].append(step)
                    self.canvas.add(name, step)
            except Exception as error:
                self.error = error
                return False
            elapsed = time.perf_counter() - self._began
            if name == ENTRANTS[-1] and self._drawing + self._last_frame < DRAWING * elapsed:
                self._draw()
            return True

    def _start_clock(self):
        self._began = time.perf_counter()
        self._drawing = self._last_frame = 0.0

    # ---- what the learner sees -----------------------------------------------------------------

    def _draw(self):
        start = time.perf_counter()
        with self._lock:
            self.show(self._report())
        self._last_frame = time.perf_counter() - start
        self._drawing += self._last_frame

    def _report(self) -> str:
        rounds = min(map(len, self.history.values()))
        if self.error is not None:
            kind = type(self.error).__name__
            state = f"stopped by an error: {html.escape(f'{kind}: {self.error}')}"
        elif self.finished:
            state = "finished: there are no more batches"
        else:
            begun = any(self.history.values())
            state = "training" if self._playing else "paused" if begun else "ready: press play"
        rows = "".join(_row(name, steps) for name, steps in self.history.items())
        heads = ("precision", "loss", "gradients that are 0", "loss scale", "skipped", "ms a step")
        heads = "".join(f"<th scope='col' style='padding:1px 12px'>{head}</th>" for head in heads)
        return (
            f"<b>Step {rounds}</b>, {state}"
            "<table style='text-align:right;font-variant-numeric:tabular-nums'>"
            f"<tr>{heads}</tr>{rows}</table>"
        )


def _button(icon, tooltip, description=None, **options):
    layout = widgets.Layout(width="90px")
    return widgets.Button(
        description=description or icon, icon=icon, tooltip=tooltip, layout=layout, **options
    )


def _row(name: str, steps: list[Step]) -> str:
    cells = ["-"] * 5
    if steps:
        last = steps[-10:]
        loss = sum(step.loss for step in last) / len(last)
        milliseconds = 1e3 * sorted(step.seconds for step in last)[len(last) // 2]
        cells = [
            f"{loss:.3f}",
            f"{last[-1].zero_share:.0%}",
            f"{last[-1].scale:g}" if name == SCALED else "-",
            str(sum(step.skipped for step in steps)) if name == SCALED else "-",
            f"{milliseconds:.0f}",
        ]
    cells = "".join(f"<td style='padding:1px 12px'>{cell}</td>" for cell in cells)
    return f"<tr><th scope='row'>{name}</th>{cells}</tr>"


class _RaceChart(Canvas):
    """The four losses above, the loss scale and the steps that it cost below."""

    def __init__(self):
        figure, (self.losses, self.scales) = new_figure(
            9, 5, nrows=2, sharex=True, height_ratios=(3, 1.4)
        )
        self.losses.set(ylabel="training loss")
        self.scales.set(ylabel="loss scale", xlabel="step", yscale="log")
        for ax in (self.losses, self.scales):
            ax.grid(alpha=0.3)
        looks = {name: LOOKS[name] for name in ENTRANTS}
        self._lines = {
            name: self.losses.plot([], [], label=name, color=color, linestyle=style, linewidth=2.5)[
                0
            ]
            for name, (color, style, _) in looks.items()
        }
        color, style, _ = looks[SCALED]
        (self._scale,) = self.scales.plot(
            [], [], color=color, linestyle=style, linewidth=2, drawstyle="steps-mid"
        )
        (self._skips,) = self.scales.plot([], [], "x", color=RED, ms=9, mew=2, label="skipped step")
        self.losses.legend(loc="lower left", frameon=False, fontsize=11, handlelength=4)
        self.scales.legend(loc="upper right", frameon=False, fontsize=11)
        super().__init__(
            figure,
            f"Lines: the training loss by step in {', '.join(ENTRANTS)}; below, the loss scale "
            "of fp16 + GradScaler and the steps that it skipped.",
            [*self._lines.values(), self._scale, self._skips],
        )
        self.clear()

    def clear(self) -> None:
        """Empty axes for 100 steps."""
        self._curves = {name: [] for name in ENTRANTS}
        self._scale_used, self._skipped_at = [], []
        self.losses.set(xlim=(0, 100), ylim=(0, 1))
        self.scales.set(ylim=(2.0**10, 2.0**20))
        self._update_ticks()

    def add(self, name: str, step: Step) -> None:
        """Append one step to the curve of `name`."""
        curve = self._curves[name]
        loss = step.loss if math.isfinite(step.loss) else math.nan
        if curve and math.isfinite(curve[-1]):
            loss = SMOOTHING * curve[-1] + (1 - SMOOTHING) * loss
        if not curve and math.isfinite(loss):
            top = max(self.losses.get_ylim()[1], 1.3 * loss)
            self.losses.set_ylim(0, top)
            self.invalidate()
        curve.append(loss)
        if len(curve) > self.losses.get_xlim()[1]:
            self.losses.set_xlim(0, 2 * len(curve))
            self.invalidate()
        if name == SCALED:
            self._add_scale(len(curve) - 1, step)

    def _add_scale(self, index, step):
        self._scale_used.append(step.scale)
        if step.skipped:
            self._skipped_at.append(index)
        low, high = self.scales.get_ylim()
        if not 2 * low <= step.scale <= high / 2:
            self.scales.set_ylim(min(low, step.scale / 16), max(high, step.scale * 16))
            self._update_ticks()

    def _update_ticks(self):
        low, high = (round(math.log2(limit)) for limit in self.scales.get_ylim())
        powers = range(low, high + 1, max(2, 2 * round((high - low) / 8)))
        self.scales.set_yticks([2.0**p for p in powers], [f"$2^{{{p}}}$" for p in powers])
        self.scales.minorticks_off()
        self.invalidate()

    def png(self) -> bytes:
        top = self.losses.get_ylim()[1]
        for name, line in self._lines.items():
            curve = [min(value, top) for value in self._curves[name]]  # stay at the upper edge
            line.set_data(range(len(curve)), curve)
        self._scale.set_data(range(len(self._scale_used)), self._scale_used)
        self._skips.set_data(self._skipped_at, [self._scale_used[i] for i in self._skipped_at])
        return super().png()
