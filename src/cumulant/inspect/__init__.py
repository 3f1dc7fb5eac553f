"""Looking into a model: open it, find its attention, watch what it computes."""
