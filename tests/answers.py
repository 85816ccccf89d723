"""What an exercise check says to an answer."""

import amp_lab as lab


def verdict(check: str, attempt, capsys) -> str:
    """The one line that `lab.checks.<check>(attempt)` prints; it must print nothing else."""
    getattr(lab.checks, check)(attempt)
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and not err
    return out
