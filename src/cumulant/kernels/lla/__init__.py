"""Local linear attention."""
