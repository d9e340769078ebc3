"""The index of sharded weights against what the shards hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint.source import FolderSource
from quantkit.errors import SourceError


def test_a_tensor_that_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    shards = {"model-1.safetensors": ["a"], "model-2.safetensors": ["b", "c.bias"]}
    for file, names in shards.items():
        save_file({name: torch.zeros(2) for name in names}, tmp_path / file)
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    table = {name: file for file, names in shards.items() for name in names}
    index.write_text(json.dumps({"weight_map": table}))
    assert FolderSource(tmp_path).names() == ["a", "b", "c.bias"]
    del table["c.bias"]
    index.write_text(json.dumps({"weight_map": table}))
    with pytest.raises(SourceError, match=r"1 tensors that the index does not name, first 'c\.bias'.*[Dd]ownload"):
        FolderSource(tmp_path)
