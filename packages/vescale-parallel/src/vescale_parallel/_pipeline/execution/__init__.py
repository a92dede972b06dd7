"""One rank's run of a schedule: its operations, its messages, its backward passes in two parts."""

from .links import Links as Links
from .offload import activations_on_host as activations_on_host
from .order import (
    operations_of_passes as operations_of_passes,
    operations_of_step as operations_of_step,
)
from .recorded import RecordedSchedule as RecordedSchedule, record_schedule as record_schedule
from .roots import (
    LossRoots as LossRoots,
    NoRoots as NoRoots,
    OutputRoots as OutputRoots,
    Roots as Roots,
    tensors_with_graph as tensors_with_graph,
)
from .run import Execution as Execution, signature_of as signature_of, watching as watching
from .split_backward import split_refusal as split_refusal
