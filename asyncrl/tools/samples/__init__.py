"""A run's samples: what the learner writes of them (`index`), and how they are looked at (`store`)."""

from asyncrl.tools.samples.model import (
    Page,
    SampleDetail,
    SampleImage,
    SampleQuery,
    SampleRow,
    TrajectoryDetail,
)
from asyncrl.tools.samples.store import SampleStore

__all__ = ["Page", "SampleDetail", "SampleImage", "SampleQuery", "SampleRow", "SampleStore", "TrajectoryDetail"]
