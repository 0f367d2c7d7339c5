"""Watching a training job: predicted beside measured, and moves on request."""

from torchrec_neuroshard.monitor.plan_monitor import PlanMonitor, Replanned
from torchrec_neuroshard.monitor.report import MonitorReport

__all__ = ["MonitorReport", "PlanMonitor", "Replanned"]
