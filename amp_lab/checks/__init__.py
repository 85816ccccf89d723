"""Exercise checks: one function an exercise.

Each takes the learner's own function and prints one line: not attempted yet, passed, or a hint for
that particular mistake. The exercises of one notebook share a module.
"""

from .auditing import *  # noqa: F403
from .classification import *  # noqa: F403
from .clinic_errors import *  # noqa: F403
from .clinic_loops import *  # noqa: F403
from .clinic_numbers import *  # noqa: F403
from .cost import *  # noqa: F403
from .floats import *  # noqa: F403
from .full_loop import *  # noqa: F403
from .many import *  # noqa: F403
from .scaling import *  # noqa: F403
from .start import *  # noqa: F403
from .tensor_cores import *  # noqa: F403
from .underflow import *  # noqa: F403
