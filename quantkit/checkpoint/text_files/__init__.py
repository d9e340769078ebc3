"""Text files: plain, packed by gzip, JSONL, parquet; those of ``wikipedia.py`` are made when fetched.

Each is read as far as a text may go, and refused beyond.
"""
