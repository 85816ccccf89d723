"""A flight recorder for training loops that use AMP.

    with lab.watch(model, optimizer, scaler) as log:
        ...                                 # any training loop, unchanged

Most AMP mistakes raise no error: the loss comes down more slowly, or only the evaluation is NaN. Each
of them leaves traces in what the loop calls, in which order, and in the gradients. `watch` listens
(`listener.py`), and tells at the end what does not fit (`findings.py`).
"""

import html

import torch
from torch import nn

from .findings import ADVICE, Finding, explain, judge
from .listener import SCALER_METHODS, Listener, WatchedStep
from .nonfinite import LOWER_PRECISION


def watch(model, optimizer, scaler=None, report: bool = True) -> "Log":
    """Record a training loop that uses AMP, and tell what is wrong with it.

    `model` is an `nn.Module`, `optimizer` a `torch.optim.Optimizer`, or a list or tuple of them.
    `scaler` is a `torch.amp.GradScaler`, a `LossScaler`, an object with the same methods, or None.
    The result is a context manager to put around any loop; the loop needs no change:

        with lab.watch(model, optimizer, scaler) as log:
            for inputs, targets in batches: ...

    On leaving the block the report is printed if there is a finding (unless `report` is False); a
    healthy loop prints nothing. `print(log)` shows the report at any time, `log.findings` and
    `log.steps` hold the same as data. An exception ends the record and passes through unchanged.

    Nothing in model, optimizer or scaler is changed and no random number is drawn: training is
    bit-equal with and without `watch`. While the block runs, the scaler classes, `torch.autocast`,
    `torch.autograd.backward`, the schedulers and a few norm functions are replaced by listening
    versions; on leaving, all are put back. Statistics by parameter are taken in the first ten
    steps and in every tenth after that; every step waits for the device.

    What cannot be seen: scaled gradients that are read by other ways than `norm`, `linalg.norm`,
    `linalg.vector_norm` or `torch.nn.utils` (a histogram in a hook, `abs().max()`), and even these if
    `from torch import norm` was bound before; precision inside a forward pass that does not go
    through `model(...)`; schedulers that do not inherit from `LRScheduler`; loops captured in a CUDA
    graph. Whether a run is slow or short of memory is no matter for `watch`.

    Raises `TypeError` for arguments of other types, and `RuntimeError` if one log is entered twice.
    """
    models = _several("model", model, nn.Module, "an nn.Module")
    optimizers = _several("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    missing = [m for m in (*SCALER_METHODS, "get_scale", "is_enabled") if not hasattr(scaler, m)]
    if scaler is not None and missing:
        raise TypeError(
            f"watch: scaler is a {type(scaler).__name__} without {missing[0]}(); expected a "
            "torch.amp.GradScaler, a LossScaler or None"
        )
    return Log(models, optimizers, scaler, report)


def _several(argument: str, value, kind: type, expected: str) -> list:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    for each in values:
        if not isinstance(each, kind):
            raise TypeError(
                f"watch: {argument} is a {type(each).__name__}, expected {expected} or a list of them; "
                "the order is watch(model, optimizer, scaler)"
            )
    if not values:
        raise TypeError(f"watch: {argument} is empty, expected {expected} or a list of them")
    return values


class Log:
    """What `watch` recorded; a context manager, `print(log)` shows the report.

    `steps` is a list of `WatchedStep`, one for each attempt to step an optimizer.
    """

    def __init__(self, models, optimizers, scaler, report):
        self._listener = Listener(models, optimizers, scaler)
        self._report = report
        self.steps: list[WatchedStep] = self._listener.steps

    def __enter__(self) -> "Log":
        self._listener.start()
        return self

    def __exit__(self, kind, error, traceback) -> bool:
        self._listener.stop()
        if isinstance(error, Exception):
            explain(self._listener, error)
        judge(self._listener, failed=error is not None)
        if self._report and self.findings:
            print(self)
        return False

    @property
    def findings(self) -> list[Finding]:
        """What does not fit, causes before their consequences. Complete when the block is left."""
        order = list(ADVICE)
        return sorted(self._listener.notes.values(), key=lambda finding: order.index(finding.code))

    def _summary(self) -> str:
        skipped = sum(s.skipped for s in self.steps)
        text = f"watch: {len(self.steps)} step{'s' * (len(self.steps) != 1)}, {skipped} skipped"
        if self._listener.scalers and self.steps:
            last = list(self._listener.scalers.values())[-1].scale
            text += f", loss scale {self.steps[0].scale:g} to {last:g}"
        kinds = [LOWER_PRECISION.get(d, str(d)) for d in self._listener.forwards if d is not None]
        text += f", autocast {' and '.join(kinds)}" if kinds else ", no autocast"
        if not self.findings:
            text += ". Nothing to report."
        return text

    def __str__(self) -> str:
        lines = [self._summary()]
        for finding in self.findings:
            since = "" if finding.step is None else f", from step {finding.step}"
            lines += [
                "",
                f"{finding.code} ({finding.certainty}{since})",
                f"  {finding.sentence}",
                f"  Try: {finding.advice}",
            ]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{f.code}</code></td><td>{f.certainty}</td>"
            f"<td>{'' if f.step is None else f.step}</td>"
            f"<td style='text-align:left'>{html.escape(f.sentence)}</td>"
            f"<td style='text-align:left'>{html.escape(f.advice)}</td></tr>"
            for f in self.findings
        )
        head = (
            "<tr><th>finding</th><th>how sure</th><th>from step</th><th>seen</th><th>try</th></tr>"
        )
        table = f"<table>{head}{rows}</table>" if rows else ""
        return f"<p>{html.escape(self._summary())}</p>{table}"
