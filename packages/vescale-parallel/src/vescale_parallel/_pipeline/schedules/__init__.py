"""Schedules as data: who computes what in which order, and which messages go where.

- ``actions.py``: an action, and the order of a rank by the name of a schedule
- ``loops.py``: gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble
- ``v_shaped.py``: zbv, dualpipev
- ``messages.py``: what is sent, over which channel, and when
- ``simulator.py``: runs all ranks' orders with a communicator's semantics
- ``picture.py``: a Gantt chart of that or of a run; ``picture_png.py``: as PNG
"""

from .action import Action as Action
from .actions import Passes as Passes, actions_of as actions_of, order_of_passes as order_of_passes
