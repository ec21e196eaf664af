"""Statistics of attention weights: of an array of weights, and streamed over tiles of scores.

`dense` is the definition; `streaming` gives the same numbers without the array. Both need only the
array libraries and nothing of masks, scores or requests, so that implementations may import them.
"""

from attnspan.statistics.dense import Statistics, column_sums, mass_on, mean_distance, statistics_of
from attnspan.statistics.streaming import RunningMean, RunningStatistics

__all__ = [
    "RunningMean",
    "RunningStatistics",
    "Statistics",
    "column_sums",
    "mass_on",
    "mean_distance",
    "statistics_of",
]
