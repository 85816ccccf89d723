"""What all exercise checks have in common: one line as the answer."""

import functools
from collections.abc import Callable


class Hint(Exception):
    """The learner's answer is wrong in a way that we recognize; the message is the hint."""


def exercise(check: Callable) -> Callable:
    """Turn `check(attempt)` into an exercise check that prints one fixed line.

    `check` calls the learner's function, returns a sentence if the answer is right, and raises `Hint`
    if it is wrong. A stub, which raises `NotImplementedError`, counts as not attempted. Any other
    exception of the learner's code is named, not hidden. Returns nothing, so that a cell may end in
    the check.
    """
    name = check.__name__

    @functools.wraps(check)
    def checked(attempt):
        if not callable(attempt):
            raise TypeError(
                f"checks.{name} was given {attempt!r}, expected your function itself: "
                f"checks.{name}(my_function), without calling it"
            )
        try:
            print(f"PASSED   {name}: {check(attempt)}")
        except NotImplementedError:
            print(
                f"TO DO    {name}: not attempted yet. Replace the raise line, then run this cell."
            )
        except Hint as hint:
            print(f"NOT YET  {name}: {hint}")
        except Exception as error:
            reason = " ".join([f"{type(error).__name__}:", *str(error).split()])
            print(f"NOT YET  {name}: your code raised {reason}")

    return checked
