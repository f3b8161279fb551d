"""Traces: every trial and span ever measured, as Parquet; the record from which a search resumes."""
