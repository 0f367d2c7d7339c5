"""Reports of plans, comparisons, rehearsals and sweeps, as text and HTML."""

from torchrec_neuroshard.report.comparison import PlanComparison, TableMove
from torchrec_neuroshard.report.explain import explain
from torchrec_neuroshard.report.page import html_report, write_html
from torchrec_neuroshard.report.plan import PlanReport
from torchrec_neuroshard.report.rehearsal import RankRehearsal, Rehearsal
from torchrec_neuroshard.report.sweep import Sweep, SweepCell

__all__ = [
    "PlanComparison",
    "PlanReport",
    "RankRehearsal",
    "Rehearsal",
    "Sweep",
    "SweepCell",
    "TableMove",
    "explain",
    "html_report",
    "write_html",
]
