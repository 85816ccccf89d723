"""Rows of words as a table: aligned text, or HTML."""

import html
from collections.abc import Iterable, Sequence

import torch


def as_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns under a dashed line."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def as_html(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table: columns of numbers to the right, all others to the left; cells are escaped.

    An empty header gives a table without one.
    """
    rows = list(rows)
    aligns = [
        "right" if all(cell[:1].isdigit() or not cell for cell in column) else "left"
        for column in zip(*rows, strict=True)
    ]

    def line(cells: Sequence[str], tag: str) -> str:
        styled = zip(cells, aligns, strict=True)
        row = "".join(
            f'<{tag} style="text-align: {align}">{html.escape(cell)}</{tag}>'
            for cell, align in styled
        )
        return f"<tr>{row}</tr>"

    head = f"<thead>{line(header, 'th')}</thead>" if header else ""
    return f"<table>{head}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


def short(dtype: torch.dtype) -> str:
    """The name that people say: FP16 for `torch.float16`."""
    names = {torch.float16: "FP16", torch.bfloat16: "BF16", torch.float32: "FP32"}
    return names.get(dtype, str(dtype).removeprefix("torch.").replace("float64", "FP64"))


def shorten(number: float, unit: str = "") -> str:
    """Three digits and a prefix: 1.09e12 becomes "1.09 T"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 999.5 or prefix == "P":
            break
        number /= 1000
    digits = 0 if not prefix or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {prefix}{unit}".rstrip()


def mib(size: float) -> str:
    """Bytes in MiB, as precise as they are big."""
    size /= 2**20
    return f"{size:,.0f} MiB" if size >= 10 else f"{size:.2f} MiB"
