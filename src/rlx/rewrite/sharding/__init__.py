"""One graph for many ranks: placements spread, collectives are inserted."""
