"""Fast paths, each compared with plain torch in outputs and gradients; one folder an operator.

host.py      what is called: `attention`, its operator (operator.py), launches
plan.py      sizes and tuning tables
forward.py   kernels, and backward.py
parts.py     what these share, and the formulas
"""

from contextlib import suppress

import torch

from . import launch

if launch.INTERPRET or torch.cuda.is_available():  # registers the operators before anything is traced
    with suppress(ImportError):  # without Triton, plain torch serves
        from .causal import host as _causal  # noqa: F401
        from .cluster import host as _cluster  # noqa: F401
        from .dense import host as _dense  # noqa: F401
        from .fold import host as _fold  # noqa: F401
        from .kmeans import attend as _kmeans  # noqa: F401
        from .lla import host as _lla  # noqa: F401
        from .short import host as _short  # noqa: F401
