"""Measurements and predictions; the last line that each program prints is one JSON document."""
