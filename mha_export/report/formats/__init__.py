"""One file per report format. A file that defines ``FORMAT`` is found by itself."""

from mha_export.report.formats._format import Format, all_formats

__all__ = ["Format", "all_formats"]
