"""What forward returned on the last stage: joined, told to all stages, and differentiated.

- ``joined.py``: what micro-batches returned, put together; gradients of that, taken apart
- ``agreed.py``: what the last stage has, on all stages
- ``deferred_backward.py``: a loss, or outputs, of which backward is the pipeline's
"""
