"""Tokens chosen for a whole batch on the device are those that each request's own sampler would choose."""

from __future__ import annotations

import pytest
import torch

from quantkit.runtime.generate.device_sampling import DeviceSampler, SamplingMode
from quantkit.runtime.generate.sampling import GenerationOptions, Sampler

CPU, VOCAB, STEPS = torch.device("cpu"), 300, 12
MIXED = [
    GenerationOptions(),
    GenerationOptions(temperature=0.7, seed=1),
    GenerationOptions(temperature=1.3, top_k=7, seed=2),
    GenerationOptions(temperature=0.9, top_p=0.6, seed=3),
    GenerationOptions(temperature=1.0, top_k=40, top_p=0.8, min_p=0.05, seed=4),
    GenerationOptions(temperature=1e-300, seed=5),
    GenerationOptions(repetition_penalty=1.8),
    GenerationOptions(temperature=2.0, repetition_penalty=0.5, top_p=0.3, seed=6),
]


@pytest.mark.parametrize("chosen", [[0], [1, 0], [6, 0], range(len(MIXED))], ids=["greedy", "plain", "penalty", "all"])
def test_a_batch_chooses_as_its_samplers_do(chosen: list[int]) -> None:
    options = [MIXED[index] for index in chosen]
    prompts = [[3, 4, 5 + row] for row in range(len(options))]
    samplers = [Sampler(one, prompt) for one, prompt in zip(options, prompts, strict=True)]
    mode = SamplingMode.of(options)
    choices = DeviceSampler(len(options) + 2, CPU)  # two rows more than there are sequences
    choices.fill(options)
    if mode.penalizes:
        choices.remember(prompts, VOCAB)
    uniform = torch.zeros(len(options) + 2, STEPS, dtype=torch.float64)
    for row, (one, prompt) in enumerate(zip(options, prompts, strict=True)):
        drawn = Sampler(one, prompt).uniforms(STEPS)
        uniform[row, : len(drawn)] = drawn
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        logits = 3 * torch.randn(len(options) + 2, VOCAB, generator=generator)
        logits[0, 7] = logits[0, 9] = 12.0  # equals: the first one, as the sampler
        expected = [sampler(row) for sampler, row in zip(samplers, logits, strict=False)]
        assert choices.choose(logits, uniform[:, step], mode).tolist()[: len(options)] == expected


def test_what_a_batch_needs() -> None:
    assert SamplingMode.of(MIXED[:1]) == SamplingMode()
    assert SamplingMode.of([GenerationOptions(top_k=5)]) == SamplingMode()  # greedy: nothing is ranked
    assert SamplingMode.of(MIXED[:2]) == SamplingMode(draws=True)
    assert SamplingMode.of(MIXED) == SamplingMode(True, True, True)


def test_rows_without_a_sequence_are_greedy_again() -> None:
    choices = DeviceSampler(2, CPU)
    choices.fill([MIXED[1], MIXED[4]])
    choices.fill([MIXED[0]])
    logits = torch.tensor([[0.0, 1.0, 0.9], [0.0, 0.9, 1.0]])
    assert choices.choose(logits, torch.zeros(2, dtype=torch.float64), SamplingMode(draws=True)).tolist() == [1, 2]
