"""Charts as inline SVG: no script, no network, colours taken from the page (light, dark, print)."""

from mha_export.report.charts._latency import latency_chart
from mha_export.report.charts._scaling import scaling_chart
from mha_export.report.charts._svg import Chart

__all__ = ["Chart", "latency_chart", "scaling_chart"]
