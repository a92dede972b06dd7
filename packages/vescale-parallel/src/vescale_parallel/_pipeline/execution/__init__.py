"""One rank's run of a schedule: its operations, its messages, its backward passes in two parts."""

from .links import Links as Links
from .offload import activations_on_host as activations_on_host
from .order import operations_of_step as operations_of_step
from .recorded import RecordedSchedule as RecordedSchedule, record_schedule as record_schedule
from .run import Execution as Execution, signature_of as signature_of, watching as watching
