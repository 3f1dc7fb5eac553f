"""Measurements: how far each order is from softmax, and what each mechanism costs in time and memory."""

from cumulant.bench.error import softmax_error
from cumulant.bench.provenance import provenance
from cumulant.bench.scaling import Measurement, peak_memory, scaling

__all__ = ["Measurement", "peak_memory", "provenance", "scaling", "softmax_error"]
