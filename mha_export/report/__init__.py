"""Versioned records of every result, and the page that joins them.

:mod:`mha_export.report.records` holds the dataclasses behind every JSON file, ``schemas/`` their
JSON Schemas, ``formats/`` one file per output format.
"""
