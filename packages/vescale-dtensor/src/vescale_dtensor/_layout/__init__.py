"""Which elements a rank holds: placements, boxes and layouts, integers only."""
