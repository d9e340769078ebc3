"""The command that serves or loads a checkpoint, for each engine: with what this folder needs, and nothing made up."""

from __future__ import annotations

import shlex

from quantkit.convert.engines.conditions import NATIVE
from quantkit.convert.engines.rules import Checkpoint


def vllm(c: Checkpoint) -> str:
    """Return ``vllm serve``; calibrated scales of an fp8 cache are used only if the cache is fp8."""
    return f"vllm serve {_path(c)}{' --kv-cache-dtype fp8' if c.fp8_cache else ''}"


def sglang(c: Checkpoint) -> str:
    """Return ``sglang serve``."""
    return f"sglang serve --model-path {_path(c)}{' --kv-cache-dtype fp8_e4m3' if c.fp8_cache else ''}"


def lmdeploy(c: Checkpoint) -> str:
    """Return ``lmdeploy serve api_server``, which finds the format in config.json."""
    return f"lmdeploy serve api_server {_path(c)}"


def transformers(c: Checkpoint) -> str:
    """Return the call in Python."""
    ours = "import quantkit.hf; " if c.format == NATIVE else ""
    fours = any(scheme.number in ("nvfp4", "mxfp4") for scheme in c.schemes())  # it decodes those to bfloat16
    dtype = ", dtype='bfloat16'" if fours else ""
    return f"{ours}transformers.{c.auto_class}.from_pretrained({c.folder!r}{dtype})"


def gptqmodel(c: Checkpoint) -> str:
    """Return the call in Python."""
    return f"gptqmodel.GPTQModel.load({c.folder!r})"


def llama_cpp(c: Checkpoint) -> str:
    """Return llama.cpp's converter, and the server of what it writes."""
    file = shlex.quote(f"{c.folder.rstrip('/')}.gguf")
    return f"python convert_hf_to_gguf.py {_path(c)} --outfile {file} && llama-server -m {file}"


def llama_server(c: Checkpoint) -> str:
    """Return the server of a GGUF file. c: its ``folder`` is the file."""
    return f"llama-server -m {_path(c)}"


def quantkit(c: Checkpoint) -> str:
    """Return ``quantkit generate``."""
    return f"quantkit generate {_path(c)} --prompt Hello"


def _path(c: Checkpoint) -> str:
    """Return the folder as a shell takes it."""
    return shlex.quote(c.folder)
