"""The report of an audit: its numbers, what they mean, and three ways to show them."""

import html
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .recorder import HALF
from .roofline import GPU, Estimate, Work, estimate, find_gpu
from .tables import as_html, as_text, mib, short, shorten


@dataclass(frozen=True)
class Row:
    """Kernels of one kind: the same operation in the same kind of module, dtype and cause.

    `module` has a star for each layer number, `modules` are the exact paths. `cause` says why it
    did not run in 16 bits. `bytes` is read and written, if nothing is cached or fused.
    """

    module: str
    modules: tuple[str, ...]
    op: str
    dtype: torch.dtype
    calls: int
    flops: int
    bytes: int
    cause: str

    @property
    def in_16_bits(self) -> bool:
        return self.dtype in HALF

    @property
    def is_cast(self) -> bool:
        return self.op.startswith("cast to ")


@dataclass(frozen=True)
class CastRow:
    """Casts of one kind. `repeated` of the `casts` convert a tensor that was converted before, and
    autocast's cache did not save them: `uncached` says why. `bytes` is read and written."""

    module: str
    source: str
    origin: torch.dtype
    target: torch.dtype
    by_autocast: bool
    weight: bool
    casts: int
    repeated: int
    bytes: int
    uncached: str


@dataclass(frozen=True)
class SavedRow:
    """Bytes kept for backward by one kind of operation, without and with autocast."""

    op: str
    without: int
    with_autocast: int
    weight_copies: int


@dataclass(frozen=True)
class Banned:
    """An operation that autocast refuses, and the first line of its message."""

    module: str
    op: str
    where: str
    message: str


@dataclass(frozen=True, repr=False)
class Audit:
    """The report of `audit`. It prints, shows as HTML, and `to_dict()` is ready for JSON.

    `rows` are the kernels that ran under autocast, heaviest first; `casts` the conversions, the
    most repeated first; `saved` what is kept for backward, by operation, biggest first.
    """

    model: str
    device_type: str
    dtype: torch.dtype
    training: bool
    rows: tuple[Row, ...]
    casts: tuple[CastRow, ...]
    saved: tuple[SavedRow, ...]
    banned: tuple[Banned, ...]
    skipped: tuple[str, ...]
    assumed: tuple[str, ...]
    work: tuple[Counter[Work], Counter[Work]]
    gpu: GPU | None

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass."""
        return sum(row.flops for row in self.rows)

    @property
    def share_16_bit(self) -> float:
        """The share of the FLOPs that run in 16 bits, from 0 to 1; 1 if there are none."""
        return 1 - sum(row.flops for row in self.islands) / self.flops if self.flops else 1.0

    @property
    def islands(self) -> tuple[Row, ...]:
        """Matrix products, convolutions and attention that did not run in 16 bits, biggest first."""
        return tuple(row for row in self.rows if row.flops and not row.in_16_bits)

    @property
    def cast_count(self) -> int:
        """Casts that autocast inserts into one forward pass."""
        return sum(row.casts for row in self.casts if row.by_autocast)

    @property
    def repeated_casts(self) -> tuple[CastRow, ...]:
        """Casts by autocast of the same tensor to the same dtype, more than once in one pass."""
        return tuple(row for row in self.casts if row.by_autocast and row.repeated)

    @property
    def saved_bytes(self) -> tuple[int, int]:
        """Bytes that autograd keeps for backward, without and with autocast.

        Each storage counts once; parameters and buffers, which exist anyway, do not count.
        """
        return sum(r.without for r in self.saved), sum(r.with_autocast for r in self.saved)

    @property
    def weight_copy_bytes(self) -> int:
        """The part of the bytes kept with autocast that is 16-bit copies of weights."""
        return sum(row.weight_copies for row in self.saved)

    def estimate(self, gpu: str | None = None) -> Estimate:
        """A roofline estimate of the speed-up on a GPU of `data/gpus.csv`; no measurement."""
        if self.device_type != "cuda":
            raise ValueError("this audit asked the CPU's rules; audit with device_type='cuda'")
        if gpu is None and self.gpu is None:
            raise ValueError("name a GPU, such as estimate('A100')")
        return estimate(self.gpu if gpu is None else find_gpu(gpu, self.dtype), *self.work)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, in words, the heaviest finding first."""
        return tuple(_advice(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, strings, lists and dicts."""
        without, with_autocast = self.saved_bytes
        report = {
            "model": self.model,
            "device_type": self.device_type,
            "dtype": self.dtype,
            "training": self.training,
            "flops": self.flops,
            "share_16_bit": self.share_16_bit,
            "islands": [asdict(row) for row in self.islands],
            "casts": {
                "by_autocast": self.cast_count,
                "repeated": sum(row.repeated for row in self.repeated_casts),
                "rows": [asdict(row) for row in self.casts],
            },
            "saved_for_backward": {
                "without_autocast": without,
                "with_autocast": with_autocast,
                "weight_copies": self.weight_copy_bytes,
                "rows": [asdict(row) for row in self.saved],
            },
            "banned": [asdict(row) for row in self.banned],
            "rows": [asdict(row) for row in self.rows],
            "advice": self.advice,
            "skipped": self.skipped,
            "assumed": self.assumed,
            "estimate": self.estimate().to_dict() if self.gpu else None,
        }
        return json.loads(json.dumps(report, default=short))

    def __repr__(self) -> str:
        facts = [f"{name:<19}{value}" for name, value in self._facts()]
        parts = [self._title() + "\n" + "\n".join(facts)]
        parts += [f"{title}\n{as_text(header, rows)}" for title, header, rows in self._tables()]
        parts += [
            f"{title}\n" + "\n".join(f"- {x}" for x in lines) for title, lines in self._lists()
        ]
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        parts = [f"<b>{html.escape(self._title())}</b>", as_html((), self._facts())]
        parts += [
            f"<b>{title}</b>{as_html(header, rows)}" for title, header, rows in self._tables()
        ]
        for title, lines in self._lists():
            items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
            parts.append(f"<b>{title}</b><ul>{items}</ul>")
        return "".join(parts)

    def _title(self) -> str:
        mode = "training" if self.training else "evaluation"
        return (
            f"{self.model} under autocast({self.device_type!r}, {self.dtype}): one forward pass in "
            f"{mode} mode, audited without running it"
        )

    def _facts(self) -> Iterator[tuple[str, str]]:
        without, with_autocast = self.saved_bytes
        repeated = sum(row.repeated for row in self.repeated_casts)
        island_flops = sum(row.flops for row in self.islands)
        yield "FLOPs", f"{shorten(self.flops)}, {self.share_16_bit:.1%} of them in 16 bits"
        yield "islands", f"{shorten(island_flops)}FLOPs in FP32" if self.islands else "none"
        yield "casts", f"{self.cast_count} inserted by autocast, {repeated} of them repeated"
        ratio = f" ({with_autocast / without:.2f}x)" if without else ""
        yield (
            "kept for backward",
            f"{mib(without)} without autocast, {mib(with_autocast)} with it{ratio}; "
            f"{mib(self.weight_copy_bytes)} of that are 16-bit copies of weights",
        )
        yield "banned", ", ".join(f"{b.op} in {b.module}" for b in self.banned) or "none"
        if self.skipped:
            yield "skipped", f"{', '.join(self.skipped)}: not counted"
        if self.assumed:
            yield "assumed", "; ".join(self.assumed)

    def _tables(self) -> Iterator[tuple[str, tuple, list]]:
        half = short(self.dtype)
        yield (
            "The heaviest kernels",
            ("module", "op", "dtype", "calls", "FLOPs", "read + write", f"why not {half}"),
            [
                (
                    row.module,
                    row.op,
                    short(row.dtype),
                    str(row.calls),
                    shorten(row.flops) if row.flops else "",
                    mib(row.bytes),
                    row.cause,
                )
                for row in self.rows[:_SHOWN]
            ],
        )
        if self.repeated_casts:
            yield (
                "Repeated casts",
                ("first cast in", "what", "casts", "repeated", "read + write", "why not cached"),
                [
                    (r.module, r.source, str(r.casts), str(r.repeated), mib(r.bytes), r.uncached)
                    for r in self.repeated_casts[:_SHOWN]
                ],
            )
        if self.saved:
            yield (
                "Kept for backward",
                ("by", "without autocast", "with", "of that weight copies"),
                [
                    (
                        r.op,
                        mib(r.without),
                        mib(r.with_autocast),
                        mib(r.weight_copies) if r.weight_copies else "",
                    )
                    for r in self.saved[:_SHOWN]
                ],
            )
        if self.gpu:
            yield (
                f"Estimated speed-up on {self.gpu.name}: a roofline, not a measurement",
                ("baseline", "from", "to"),
                [
                    (s.baseline, f"{s.low:.1f}x", f"{s.high:.1f}x")
                    for s in self.estimate().speed_ups
                ],
            )

    def _lists(self) -> Iterator[tuple[str, Iterable[str]]]:
        if self.gpu:
            result = self.estimate()
            kernels = [work.total() for work in self.work]
            launches = (
                f"where the GPU waits for the CPU to launch kernels (small batches), only their "
                f"number counts: {kernels[0]} without autocast, {kernels[1]} with it, "
                f"{result.launch_ratio:.2f}x"
            )
            yield "The estimate assumes", (*result.assumptions, launches)
        if self.advice:
            yield "What to do", self.advice


_SHOWN = 12


def _advice(report: Audit) -> Iterator[str]:
    for row in report.islands:
        share = f"{row.module}: {row.op}, {row.flops / report.flops:.1%} of the FLOPs, {row.cause}"
        if row.dtype == torch.float64:
            yield f"{share}. Give it FP32 inputs."
        elif row.cause.startswith("autocast is off"):
            yield f"{share}. If it stands 16 bits, take it out of that block."
        else:
            yield f"{share}. If it stands 16 bits, cast its inputs to {short(report.dtype)} yourself."
    yield from _traffic_advice(report)
    for row in report.banned:
        yield f"{row.module}: {row.op} raises under autocast. {row.message}"
    for row in report.repeated_casts:
        what = f"{row.module}: {row.source} is cast to {short(row.target)} again ({row.repeated}x)"
        if "frozen" in row.uncached:
            yield f"{what}. Frozen weights may be kept in {short(row.target)} from the start."
        elif row.target in HALF:
            yield f"{what}. Cast it once, before the operations that share it."
    without, with_autocast = report.saved_bytes
    if with_autocast > without:
        yield (
            f"Autocast keeps {mib(with_autocast - without)} more for backward: "
            f"{mib(report.weight_copy_bytes)} are copies of weights. A larger batch outweighs them."
        )


def _traffic_advice(report: Audit) -> Iterator[str]:
    """Modules whose element-by-element work in FP32 is a tenth of all memory traffic or more."""
    groups = defaultdict(list)
    for row in report.rows:
        if row.dtype.is_floating_point and not (row.in_16_bits or row.flops or row.is_cast):
            groups[row.module].append(row)
    total = sum(row.bytes for row in report.rows)
    for module, rows in groups.items():
        share = sum(row.bytes for row in rows) / total
        if share >= 0.1:
            began = next(
                (row.cause for row in rows if row.cause.startswith("autocast keeps")), rows[0].cause
            )
            yield (
                f"{module}: {share:.0%} of all memory traffic is FP32, in "
                f"{', '.join(dict.fromkeys(row.op for row in rows))}: {began}. One fused operation "
                "in place of several, or a cast back to 16 bits, makes it less."
            )
