"""Watching a training job: predicted beside measured, fresh inputs, better plans."""

from torchrec_neuroshard.monitor.assessment import MonitorReport, Offer
from torchrec_neuroshard.monitor.plan_monitor import PlanMonitor, Replanned

__all__ = ["MonitorReport", "Offer", "PlanMonitor", "Replanned"]
