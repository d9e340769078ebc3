"""``import quantkit.hf`` teaches transformers the native format, for ``AutoModelForCausalLM.from_pretrained(folder)``.

Importing it again changes nothing. The layers are quantkit's ``QuantLinear`` and ``QuantEmbedding``, packed for the
device that ``device_map`` gives; a loaded model does not move to another kind of device. Attention and cache are
transformers' own: a KV cache that was calibrated is used by ``quantkit.load``, not here. Read against transformers 5.17
and 5.23 (quantizers/auto.py; modeling_utils.py, from_pretrained).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.source import Source
from quantkit.errors import RequestError, UnsupportedModel
from quantkit.formats.kv_scales import read_kv_plan
from quantkit.formats.native import Native
from quantkit.formats.reader import QuantizedReader
from quantkit.runtime.layers.build import find_modules, load_packed, tied_heads
from quantkit.runtime.layers.fused import fuse_linears

METHOD = "quantkit"
INDEX, SINGLE = f"{Native.stem}.safetensors.index.json", f"{Native.stem}.safetensors"


class QuantkitConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a native folder, as it is stored."""

    def __init__(self, **stored: Any) -> None:
        self.__dict__.update(stored)
        self.quant_method = METHOD  # type: ignore[assignment]  # an enum of the methods that transformers knows


class QuantkitQuantizer(HfQuantizer):
    """Loads packed layers while transformers loads the rest. Nothing is quantized here: ``quantkit convert`` does that.

    Raises RequestError for a model on several devices, UnsupportedModel for a mixture of experts, CheckpointError for a
    folder whose tensors do not fit.
    """

    requires_calibration = True

    def update_tp_plan(self, config: Any) -> Any:
        """Name the weight files: transformers 5.17 calls this before it looks for them."""
        return _name_files(config)

    def update_attn_implementation(self, config: Any) -> Any:
        """Name the weight files: later releases call this before they look for them."""
        return _name_files(config)

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **given: Any) -> None:
        """Take the float weights away from packed layers, and tell transformers not to wait for them."""
        folder = Path(checkpoint_files[0]).parent
        source = open_source(folder)
        reader = QuantizedReader(source)
        self.module_names = _module_names(model, source, reader)
        self.source, self.reader = source, reader
        self.shared = tied_heads(model, source, self.module_names)
        away = {f"{name}.weight" for name in [*self.module_names.values(), *self.shared.values()]}
        for name in away:
            layer = model.get_submodule(name.removesuffix(".weight"))
            layer._parameters.pop("weight")
            layer._is_hf_initialized = True  # there is nothing to fill with random numbers
        model.all_tied_weights_keys = {
            twin: first for twin, first in model.all_tied_weights_keys.items() if not {twin, first} & away
        }
        packed = {f"{stored}.{part}" for stored in self.module_names for part in reader.modules[stored]}
        model._keys_to_ignore_on_load_unexpected |= {rf"^{name.replace('.', chr(92) + '.')}$" for name in packed}

    def _process_model_after_weight_loading(self, model: Any, **given: Any) -> Any:
        """Read and pack the layers, one at a time."""
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) != 1 or torch.device("meta") in devices:
            shown = ", ".join(sorted(str(device) for device in devices))
            raise RequestError(
                f'{self.source.path}: a native model runs on one device, not on {shown}. Use device_map={{"": 0}}.'
            )
        (device,) = devices
        load_packed(model, self.source, self.reader, self.module_names, self.shared, device, model.dtype, None)
        if device.type == "cuda":
            fuse_linears(model, device)
        if self.source.path.is_dir() and read_kv_plan(self.source.path) is not None:
            logging.get_logger(__name__).warning(
                f"{self.source.path} holds a calibrated KV cache; transformers keeps its own in 16 bits or more."
                " quantkit.load uses it."
            )
        return model

    def is_serializable(self, **given: Any) -> bool:
        return False  # packed for this machine; the folder that it came from is the model

    @property
    def is_trainable(self) -> bool:
        return False


def _module_names(model: Any, source: Source, reader: QuantizedReader) -> dict[str, str]:
    """Find the module of each packed weight: stored name -> module name.

    Raises UnsupportedModel for experts that transformers holds as one tensor.
    """
    stacked = [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)
    ]
    if stacked:
        raise UnsupportedModel(
            f"{source.path}: {stacked[0]} holds its experts as one tensor in transformers, and packed one by one in the"
            " file. Use quantkit.load."
        )
    return find_modules(model, reader, str(source.path))


def _name_files(config: Any) -> Any:
    """Put the names of the weight files into the config.

    Plain transformers does not look for these names (``checkpoint/source.py``, STEMS).
    """
    folder = str(config._name_or_path)
    if os.path.isdir(folder):
        sharded = os.path.exists(os.path.join(folder, INDEX))
    else:
        revision = getattr(config, "_commit_hash", None)
        sharded = bool(cached_file(folder, INDEX, revision=revision, _raise_exceptions_for_missing_entries=False))
    config.transformers_weights = INDEX if sharded else SINGLE
    return config


def register() -> None:
    """Register config and quantizer with transformers, what importing this module does; once."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(QuantkitConfig)
        register_quantizer(METHOD)(QuantkitQuantizer)


register()
