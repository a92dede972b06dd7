"""From one layout to another: the steps, who sends what to whom, then the bytes."""
