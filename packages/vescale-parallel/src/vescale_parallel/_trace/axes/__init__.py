"""Named axes: what every dimension of a model's tensors is, from one forward on fakes."""

from .algebra import Axes as Axes, Dim as Dim
from .flow import (
    Flow as Flow,
    Graph as Graph,
    RefusedError as RefusedError,
    is_within as is_within,
)
from .graph import (
    Argument as Argument,
    Obstacle as Obstacle,
    Step as Step,
    Trace as Trace,
    UnknownOperator as UnknownOperator,
    Value as Value,
)
from .infer import infer_axes as infer_axes
from .propagate import check_partial as check_partial, follow as follow
