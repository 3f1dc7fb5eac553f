"""Measurements: distance from softmax, cost in time, memory and work, accuracy of trained models."""

from cumulant.bench.cab import compositional_index, efficiency_length
from cumulant.bench.capture import Captured, capture
from cumulant.bench.error import softmax_error
from cumulant.bench.pareto import error_against_cost
from cumulant.bench.provenance import provenance
from cumulant.bench.scaling import Measurement, peak_memory, scaling

__all__ = [
    "Captured",
    "Measurement",
    "capture",
    "compositional_index",
    "efficiency_length",
    "error_against_cost",
    "peak_memory",
    "provenance",
    "scaling",
    "softmax_error",
]
