"""The canonical stand-alone graph of one attention."""

from __future__ import annotations
