"""Run a constructor without memory: record its operators and move its generators."""
