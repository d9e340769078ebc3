"""Small whole files of every kind that quantkit reads, made from one tiny model: what ``mutations.py`` damages."""

from __future__ import annotations

import copy
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

TINY = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=1,
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_originals(folder: Path) -> Path:
    """Write the originals into an empty folder and return it."""
    model, tokenizer = _float_model(folder / "float")
    model.save_pretrained(folder / "sharded", max_shard_size="20KB")
    tokenizer.save_pretrained(folder / "sharded")
    _converted(folder)
    _gguf(folder / "model.gguf", model, tokenizer)
    shutil.copyfile(folder / "model.gguf", folder / "packed.gguf")
    _imatrix(folder / "imatrix.gguf")
    _floats(folder)
    _seldom(folder)
    _gpt_oss(folder / "gpt-oss", folder / "float", len(tokenizer))
    _texts(folder / "texts")
    _seeing(folder / "seeing", tokenizer)
    _stopped_job(folder)
    return folder


def _float_model(folder: Path) -> Any:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from quantkit.checkpoint.tokenizer import ENGLISH, ROUND_TRIP_TEXT

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([ENGLISH, ROUND_TRIP_TEXT] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=len(fast), tie_word_embeddings=True, **TINY)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return model, fast


def _converted(folder: Path) -> None:
    from quantkit import convert

    text = folder / "calibration.txt"
    text.write_text("The history of the world is the history of the people who lived in it. " * 200)
    common: Any = dict(group_size=16, calibration=str(text), samples=4, seq_len=32)
    convert(folder / "float", folder / "native", method="rtn", format="native", kv_bits=8, kv_scales="static", **common)
    convert(folder / "float", folder / "gptq", method="rtn", format="gptq", group_size=16)
    convert(folder / "float", folder / "compressed", method="rtn", format="compressed-tensors", group_size=16)
    shutil.copytree(folder / "float", folder / "plan")
    convert(folder / "float", folder / "repack", method="rtn", format="native", group_size=16, symmetric=False)
    convert(folder / "float", folder / "awq", method="rtn", format="awq", group_size=16, symmetric=False)
    config = json.loads((folder / "gptq" / "config.json").read_text())
    old = shutil.copytree(folder / "gptq", folder / "old-gptq")
    del config["quantization_config"]  # older folders say it in quantize_config.json alone
    (old / "config.json").write_text(json.dumps(config, indent=1))


def _gguf(path: Path, model: Any, tokenizer: Any) -> None:
    import gguf
    import numpy as np

    def rows(weight: Any, heads: int) -> Any:
        parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        return parts.swapaxes(1, 2).reshape(weight.shape)

    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    inner = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(inner["vocab"], key=inner["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(32)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in inner["merges"]])
    for name, value in model.float().state_dict().items():
        if name == "lm_head.weight":
            continue
        if name in outer:
            writer.add_tensor(outer[name], value.numpy())
            continue
        _, _, block, rest = name.split(".", 3)
        stem = rest.removesuffix(".weight")
        stored = rows(value, 4 if "q_proj" in stem else 2) if stem.endswith(("q_proj", "k_proj")) else value
        if "proj" in stem:
            code = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(np.ascontiguousarray(stored.numpy()), code)
            writer.add_tensor(f"blk.{block}.{names[stem]}.weight", packed, raw_dtype=code)
        else:
            writer.add_tensor(f"blk.{block}.{names[stem]}.weight", stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _imatrix(path: Path) -> None:
    import torch

    from quantkit.checkpoint.gguf_files.imatrix import Importance, write_imatrix

    entries = {
        f"blk.{block}.{name}.weight": Importance(torch.rand(1, width) + 0.1, torch.full((1,), 8.0))
        for block in range(2)
        for name, width in (("attn_q", 32), ("ffn_down", 64))
    }
    write_imatrix(path, entries, "text", 4, 32)


def _floats(folder: Path) -> None:
    """FP8 as DeepSeek and transformers store it, NVFP4 as ModelOpt does, MXFP4 as compressed-tensors has it."""
    from safetensors.torch import load_file, save_file

    from quantkit import convert

    for scheme in ("fp8", "nvfp4", "mxfp4"):
        convert(folder / "float", folder / scheme, method="rtn", scheme=scheme)
    shutil.move(folder / "nvfp4", folder / "modelopt")
    configs = {
        "fp8": {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        "modelopt": {},
    }
    for name, quantization in configs.items():
        file = folder / name / "model.safetensors"
        config = json.loads((folder / name / "config.json").read_text())
        del config["quantization_config"]
        (folder / name / "config.json").write_text(json.dumps({**config, **quantization}, indent=1))
        (folder / name / "model.safetensors.index.json").unlink()
        (folder / name / "quantkit.json").unlink()
        tensors = {}
        for key, value in load_file(file).items():
            module, _, local = key.rpartition(".")
            if local == "weight_global_scale":
                tensors[f"{module}.weight_scale_2"] = (1 / value).reshape(())
            else:
                tensors[f"{module}.weight" if local == "weight_packed" else key] = value
            if name == "fp8" and local == "weight_scale":
                tensors[f"{module}.activation_scale"] = value[0].clone()
        save_file(tensors, file)
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "modelopt" / "hf_quant_config.json").write_text(json.dumps(settings, indent=1))


def _seldom(folder: Path) -> None:
    """What other tools store: NF4 of bitsandbytes, NVFP4 and W8A8 of llm-compressor, act-order groups, wide scales."""
    import torch
    from safetensors.torch import load_file, save_file

    from quantkit import convert

    convert(folder / "float", folder / "nf4", format="bitsandbytes", scheme="nf4-double")
    convert(folder / "float", folder / "nvfp4", method="rtn", scheme="nvfp4")
    convert(folder / "float", folder / "w8a8", method="rtn", activations="int8")
    convert(folder / "float", folder / "act-order", method="rtn", group_size=32, bits=4)
    file = folder / "act-order" / "model.safetensors"
    file.with_name("model.safetensors.index.json").unlink()
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        module = name.removesuffix(".weight_packed")
        tensors[f"{module}.weight_g_idx"] = (torch.arange(tensors[name].shape[1] * 8) // 32).flip(0).to(torch.int32)
        tensors[f"{module}.weight_scale"] = tensors[f"{module}.weight_scale"].float()
    save_file(tensors, file, {"format": "pt"})


def _gpt_oss(folder: Path, tokenizer: Path, vocabulary: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=vocabulary, num_local_experts=2, num_experts_per_tok=1, **TINY
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shutil.copytree(tokenizer, folder)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inside, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, out, inside // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, out, inside // 32), 121, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(stored, indent=1))


def _texts(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    records = [{"text": f"Sentence {i} — of é 😀.", "id": i, "meta": {"tags": ["a", i]}} for i in range(20)]
    lines = "\n".join(json.dumps(record) for record in records)
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (folder / "a.txt").write_text("\n".join(record["text"] for record in records))
    parquet.write_table(
        pyarrow.table({"text": [r["text"] for r in records], "id": [r["id"] for r in records]}), folder / "a.parquet"
    )


def _seeing(folder: Path, tokenizer: Any) -> None:
    """What of a model with vision its processor is made of, and an image."""
    from PIL import Image
    from transformers import CLIPImageProcessorPil

    folder.mkdir()
    with_mark = copy.deepcopy(tokenizer)
    with_mark.add_special_tokens({"extra_special_tokens": ["<image>"]})
    with_mark.chat_template = None
    with_mark.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    of_llava = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor", **of_llava}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llava"}))
    Image.new("RGB", (20, 28), (200, 100, 50)).save(folder / "image.png")


def _stopped_job(folder: Path) -> None:
    """A work folder as an interrupted conversion leaves it."""
    from stopping import stop_at

    from quantkit import convert

    (folder / "job").mkdir()
    try:
        convert(folder / "float", folder / "job" / "out", method="rtn", group_size=16, on_progress=stop_at("blocks", 1))
    except KeyboardInterrupt:
        return
    raise AssertionError("the conversion was not interrupted")
