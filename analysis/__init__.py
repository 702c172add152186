"""What the numbers mean: results table → verdict and report. Pure: no cluster, no tracking, no training."""

from analysis.report import render_report
from analysis.result import StudyAnalysis
from analysis.study import analyse
from analysis.table import AnalysisError

__all__ = ["AnalysisError", "StudyAnalysis", "analyse", "render_report"]
