"""The boundary where files of strangers become our values: JSON, the fields of a config, references to code."""
