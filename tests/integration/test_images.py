"""Prompts with images: tiny models of several kinds give the tokens that transformers' own ``generate`` gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit as qk
from quantkit.errors import QuantkitError, RequestError, SourceError, UnsupportedModel

pytest.importorskip("PIL")
from PIL import Image

SPECIAL = (
    "<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<start_of_image>",
    "<end_of_image>", "<image_soft_token>",
)  # fmt: skip
PATCHES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
QWEN = dict(depth=2, hidden_size=32, num_heads=2, intermediate_size=48, patch_size=4, spatial_merge_size=2)
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
MARKS = {
    "llava": "<image>",
    "gemma3": "<start_of_image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
}
HYBRID = dict(
    linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
PROMPT = "The old fox and the committee"


def parts(kind: str, ids: dict[str, int]) -> tuple[dict[str, Any], Any]:
    """The config beside its language part, and the processor of a kind, from the ids of the marks."""
    from transformers import (
        CLIPImageProcessorPil,
        Gemma3ImageProcessorPil,
        Qwen2VLImageProcessorPil,
    )  # fmt: skip

    pixels = dict(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024})
    sections = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    marks = dict(
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    if kind == "llava":
        vision = dict(PATCHES, model_type="clip_vision_model", image_size=16, patch_size=8)
        config = dict(vision_config=vision, image_token_index=ids["<image>"])
        return config, CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    if kind == "gemma3":
        vision = dict(PATCHES, model_type="siglip_vision_model", image_size=16, patch_size=4, vision_use_head=False)
        config = dict(
            vision_config=vision, mm_tokens_per_image=4, image_token_index=ids["<image_soft_token>"],
            boi_token_index=ids["<start_of_image>"], eoi_token_index=ids["<end_of_image>"],
        )  # fmt: skip
        return config, Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    if kind == "qwen2_5_vl":
        config = dict(vision_config=dict(QWEN, out_hidden_size=64, fullatt_block_indexes=[1], window_size=16))
        return {**config, **marks, "text": {"rope_parameters": sections}}, Qwen2VLImageProcessorPil(**pixels)
    config = dict(
        vision_config=dict(QWEN, out_hidden_size=64, deepstack_visual_indexes=[0], num_position_embeddings=64)
    )
    sections = {**sections, "mrope_interleaved": True}
    if kind == "qwen3_5":
        config["vision_config"].pop("deepstack_visual_indexes")
        sections = {**sections, "partial_rotary_factor": 1.0}
        return {**config, **marks, "text": {**HYBRID, "rope_parameters": sections}}, Qwen2VLImageProcessorPil(**pixels)
    return {**config, **marks, "text": {"rope_parameters": sections}}, Qwen2VLImageProcessorPil(**pixels)


@pytest.fixture(scope="module")
def seeing(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the folder of a tiny model of a kind, with tokenizer, processor and chat template; do not modify."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind in made:
            return made[kind]
        folder = made[kind] = tmp_path_factory.mktemp(kind) / "model"
        tokenizer = AutoTokenizer.from_pretrained(tiny_original)
        tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
        ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in SPECIAL}
        tokenizer.chat_template = TEMPLATE.replace("MARK", MARKS[kind])
        tokenizer.save_pretrained(folder)
        if kind == "gemma3":  # as published: names for three of them
            stored = json.loads((folder / "tokenizer_config.json").read_text())
            stored["extra_special_tokens"] = dict(
                image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"
            )
            (folder / "tokenizer_config.json").write_text(json.dumps(stored))
        beside, images = parts(kind, ids)
        images.save_pretrained(folder)
        extra = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        values = extra if kind == "llava" else {"image_seq_length": 4} if kind == "gemma3" else {}
        (folder / "processor_config.json").write_text(json.dumps(values))
        text = json.loads((tiny_original / "config.json").read_text())
        kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
        small = {key: text[key] for key in kept} | dict(
            vocab_size=len(tokenizer), head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
            pad_token_id=0, **beside.pop("text", {}),
        )  # fmt: skip
        if kind == "llava":
            small["model_type"] = "llama"
        config = AutoConfig.for_model(kind, text_config=small, tie_word_embeddings=False, **beside)
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "noise.png"
    pixels = torch.randint(0, 256, (20, 28, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    Image.frombytes("RGB", (28, 20), pixels.numpy().tobytes()).save(path)
    return path


def expected(folder: Path, loaded: Any, image: Path, tokens: int) -> list[int]:
    """What transformers generates from the processor's own output."""
    from transformers import AutoModelForImageTextToText

    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}]
    text = loaded.tokenizer.apply_chat_template(messages, tokenize=False)
    inputs = loaded.processor(text=[text], images=[Image.open(image)], return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = reference.generate(**inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    answer: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return answer


@pytest.mark.parametrize("kind", MARKS)
def test_a_prompt_with_an_image_gives_the_tokens_that_transformers_gives(
    kind: str, seeing: Callable[[str], Path], image: Path
) -> None:
    folder = seeing(kind)
    loaded = qk.load(folder, dtype="float32", device="cpu")
    answer = loaded.generate(PROMPT, images=[image], max_tokens=8, ignore_eos=True)
    assert answer.tokens == expected(folder, loaded, image, 8)
    blind = loaded.generate(PROMPT, max_tokens=8, ignore_eos=True)
    assert blind.tokens != answer.tokens
    assert answer.prompt_tokens > blind.prompt_tokens


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_prompts_with_and_without_images_in_one_call_are_answered_as_alone(
    kind: str, seeing: Callable[[str], Path], image: Path
) -> None:
    loaded = qk.load(seeing(kind), dtype="float32", device="cpu")
    other = Image.open(image).rotate(180)
    given = [[image], [], [other, image]]
    answers = loaded.generate([PROMPT, "Once", PROMPT], images=given, max_tokens=6, ignore_eos=True)
    for prompt, images, answer in zip([PROMPT, "Once", PROMPT], given, answers, strict=True):
        alone = loaded.generate(prompt, images=images, max_tokens=6, ignore_eos=True)
        assert alone.tokens == answer.tokens


def test_a_quantized_model_sees_and_the_command_takes_a_file(
    seeing: Callable[[str], Path], image: Path, tmp_path: Path, quantkit: Callable[..., Any]
) -> None:
    out = tmp_path / "out"
    qk.convert(seeing("gemma3"), out=out, method="rtn", bits=8, group_size=32)
    shown = quantkit("generate", out, "--prompt", PROMPT, "--image", image, "--max-tokens", "4", "--json").stdout
    loaded = qk.load(out)
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}, {"type": "image"}]}]
    assert len(loaded.generate(messages, images=[image], max_tokens=4, ignore_eos=True).tokens) == 4
    assert json.loads(shown)["prompt_tokens"] == len(loaded.encode(PROMPT)) + 2 + 4 + _newlines(loaded)


def _newlines(loaded: Any) -> int:
    """Tokens of the empty lines that Gemma puts around an image."""
    both: int = 2 * len(loaded.tokenizer("\n\n", add_special_tokens=False)["input_ids"])
    return both


def test_bad_images_are_named(seeing: Callable[[str], Path], tiny_original: Path, image: Path, tmp_path: Path) -> None:
    loaded = qk.load(seeing("llava"), dtype="float32", device="cpu")
    broken = tmp_path / "broken.png"
    broken.write_bytes(image.read_bytes()[:200])
    for file, message in [(tmp_path / "none.png", "no such image"), (broken, "cannot be read as an image")]:
        with pytest.raises(RequestError, match=message):
            loaded.generate(PROMPT, images=[file])
    with pytest.raises(SourceError, match="folder"):
        loaded.generate(PROMPT, images=[tmp_path])
    with pytest.raises(RequestError, match="2 places for images, 1 images are given"):
        loaded.generate([{"role": "user", "content": [{"type": "image"}] * 2}], images=[image])
    with pytest.raises(RequestError, match="give one list for each prompt"):
        loaded.generate([PROMPT, PROMPT], images=[[image]])
    with pytest.raises(UnsupportedModel, match="reads no images"):
        qk.load(tiny_original).generate(PROMPT, images=[image])


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("preprocessor_config.json", "size", {"height": 10**9, "width": 16}),
        ("processor_config.json", "num_additional_image_tokens", 10**9),
        ("processor_config.json", "processor_class", "OwnProcessor"),
        ("preprocessor_config.json", "auto_map", {"AutoImageProcessor": "m.Own"}),
    ],
)
def test_damaged_and_foreign_processors_are_refused(
    file: str, field: str, value: Any, seeing: Callable[[str], Path], image: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(seeing("llava"), tmp_path / "model")
    (folder / "m.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    settings = json.loads((folder / file).read_text()) | {field: value}
    if field == "auto_map":
        settings["image_processor_type"] = "Own"
    (folder / file).write_text(json.dumps(settings))
    loaded = qk.load(folder, dtype="float32", device="cpu")
    with pytest.raises(QuantkitError, match=str(folder)):
        loaded.generate(PROMPT, images=[image], max_tokens=2)
    assert not (tmp_path / "ran").exists()
