"""The short step of a GPU and decoding ahead of the host, on a CPU in Triton's interpreter.

All but the capture; in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from step_models import greedy_logits, packed, tiny
from triton_cases import INTERPRETED, passes_in_the_interpreter

from quantkit.core.kvscheme import KVScheme, LayerScales
from quantkit.core.scheme import Scheme
from quantkit.runtime.generate import cuda_graphs
from quantkit.runtime.generate.loop import Generation, run
from quantkit.runtime.generate.sampling import GenerationOptions
from quantkit.runtime.kernels.triton.tile_table import Tile
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.paged_layer import layer_spec

CPU = torch.device("cpu")
FEW: dict[str, Any] = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)

if not INTERPRETED:

    @pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_in_the_interpreter(chosen: str) -> None:
        pytest.importorskip("triton")
        passes_in_the_interpreter(__file__, "-m", chosen)

else:

    def step_of(model: Any) -> Any:
        from quantkit.runtime.decode.family import recognise
        from quantkit.runtime.decode.gpu_step import GpuStep

        family = recognise(model.module)
        assert family is not None
        return GpuStep(family, torch.float32)

    @pytest.mark.parametrize(
        ("kind", "scheme", "kv_bits"),
        [
            ("gemma3_text", Scheme(8, None), 4),
            pytest.param("llama", Scheme(4, 32, False), 16, marks=pytest.mark.slow),
            pytest.param("qwen3", None, "k4v2", marks=pytest.mark.slow),
        ],
        ids=["gemma3-w8-kv4", "llama-w4", "qwen3-dense-k4v2"],
    )
    def test_a_step_equals_the_definition(
        kind: str, scheme: Scheme | None, kv_bits: int | str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of the linears only the joining is seen here: as dense products, which the interpreter does in no time."""
        monkeypatch.setattr("quantkit.runtime.kernels.triton.launch.choose_tile", lambda *given: Tile("dequantize"))
        few = dict(num_attention_heads=2, num_key_value_heads=1) if kind == "gemma3_text" else {}
        few |= {} if kv_bits == 16 else dict(head_dim=16)
        model = packed(tiny(kind, kv_bits, **few), scheme)
        step = step_of(model)
        assert step.reads(model._specs)
        assert all((pair is not None) == (scheme is not None) for pair in step._pairs)
        ids = torch.randint(3, 90, (2, 146), generator=torch.Generator().manual_seed(1))
        expected = greedy_logits(model, ids, 144, [144, 131])
        model.__dict__["fast_step"] = step
        torch.testing.assert_close(greedy_logits(model, ids, 144, [144, 131]), expected, rtol=1e-3, atol=1e-4)

    def test_the_step_is_proved_on_the_twin_and_refused_by_name() -> None:
        from quantkit.runtime.decode.gpu_step import gpu_step

        model = tiny("llama", **FEW)
        step, why = gpu_step(model.module, model.config, torch.float32, CPU)
        assert step is not None
        assert why == ""
        opt = tiny("opt", ffn_dim=128)
        step, why = gpu_step(opt.module, opt.config, torch.float32, CPU)
        assert step is None
        assert "this opt are not those" in why

    def test_pages_that_the_kernels_do_not_read_are_refused_by_name() -> None:
        from quantkit.runtime.decode.gpu_step import why_unreadable

        model = tiny("llama", 4, **FEW)
        step, (spec,) = step_of(model), model._specs
        assert step.reads([spec])
        assert "computes in torch.bfloat16" in why_unreadable(spec, torch.bfloat16, step.heads)
        assert "multiples of 16 and 8" in why_unreadable(spec, torch.float32, replace(step.heads, dim=24))
        assert "128 queries a key head" in why_unreadable(spec, torch.float32, replace(step.heads, query=128))
        ones = torch.ones(1, 16)
        static = layer_spec(KVScheme.of(4, "static"), LayerScales(ones, ones, ones, ones), torch.float32, CPU, None)
        cache = KVCache([static])
        cache.layers[0].append(torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 3, 16))
        with pytest.warns(UserWarning, match="runs the transformers definition: its packed pages have static scales"):
            assert step(torch.zeros(1, 1, dtype=torch.int64), cache) is None

    def answers(model: Any, options: list[GenerationOptions], end: int) -> dict[int, Generation]:
        prompts = [[5, 6, 7] * 4, [1] * 62, [9, 8]][: len(options)]
        pieces = run(model, prompts, options, end_tokens=(end,), context=model.context)
        return {piece.row: piece.done for piece in pieces if piece.done is not None}

    def test_a_batch_ahead_of_the_host_gives_what_single_steps_give() -> None:
        """Sequences of their own lengths, sampled and greedy.

        Two leave early, so that the last goes on in a smaller slot.
        """
        model = tiny("mistral", sliding_window=66, **FEW)
        drawn = GenerationOptions(max_tokens=7, temperature=0.8, top_k=20, top_p=0.9, seed=3, repetition_penalty=1.3)
        options = [GenerationOptions(max_tokens=4), GenerationOptions(max_tokens=3, temperature=1.0, min_p=0.01), drawn]
        end = answers(model, [GenerationOptions(max_tokens=4)], -1)[0].tokens[
            2
        ]  # the first answer ends one token early
        expected = answers(model, options, end)
        assert expected[0].finish_reason == "stop"
        model.__dict__["graph_decoder"] = loop = model.new_graph_decoder(step_of(model), capture=False)
        for _ in range(2):  # the second batch finds slots that were used
            found = answers(model, options, end)
            for row, wanted in expected.items():
                assert found[row].tokens == wanted.tokens
                assert (found[row].finish_reason, found[row].kv_cache_bytes) == (
                    wanted.finish_reason,
                    wanted.kv_cache_bytes,
                )
        assert sorted(loop._slots) == [1, 4]
        assert not loop.guard.locked()

    def test_pages_are_packed_ahead_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
        """Pages that become old on the way, in one sequence its first.

        That one goes on alone in a smaller slot, whose pages come round again.
        """
        model = tiny("mistral", 4, sliding_window=70, **FEW)
        prompts = [[5, 6, 7] * 7, [7, 8, 1, 3] * 31]
        options = [GenerationOptions(max_tokens=2), GenerationOptions(max_tokens=7)]

        def tokens() -> dict[int, list[int]]:
            pieces = run(model, prompts, options, end_tokens=(), context=model.context)
            return {piece.row: piece.done.tokens for piece in pieces if piece.done is not None}

        expected = tokens()
        step = step_of(model)
        model.__dict__["graph_decoder"] = loop = model.new_graph_decoder(step, capture=False)
        assert tokens() == expected
        assert sorted(loop._slots) == [1, 2]
        packing, caches = step._packing.pack, []
        fill = cuda_graphs.DeviceTables.fill

        def poisoned(*given: Any) -> None:
            packing(*given)
            for layer in caches[-1].layers:
                layer.packed.fields["value_scales"][..., 1] = 100.0

        monkeypatch.setattr(
            cuda_graphs.DeviceTables,
            "fill",
            lambda self, cache, until: (caches.append(cache), fill(self, cache, until)),
        )
        monkeypatch.setattr("quantkit.runtime.kernels.triton.pack_page.pack", poisoned)
        assert tokens() != expected  # what is packed is what is read

    def test_a_second_batch_meanwhile_runs_step_by_step() -> None:
        model = tiny("llama", **FEW)
        options = GenerationOptions(max_tokens=4)
        expected = answers(model, [options], -1)[0].tokens
        model.__dict__["graph_decoder"] = loop = model.new_graph_decoder(step_of(model), capture=False)
        first = run(model, [[5, 6, 7] * 4], [options], end_tokens=(), context=None)
        next(first)
        assert loop.guard.locked()
        assert answers(model, [options], -1)[0].tokens == expected
        assert [piece.done for piece in first if piece.done][-1].tokens == expected
        assert not loop.guard.locked()
        unfinished = run(model, [[5, 6, 7] * 4], [options], end_tokens=(), context=None)
        next(unfinished)
        unfinished.close()
        assert not loop.guard.locked()

    class Recorder:
        """Stands for CUDA graphs: runs again what ran while it recorded."""

        def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
            self.graphs: list[Any] = []
            self.recording: Any = None
            self.fails = fails
            run_slot = cuda_graphs.Slot.run

            def run(slot: Any, mode: Any) -> None:
                if self.recording is None:
                    run_slot(slot, mode)
                else:
                    self.recording.again = lambda: run_slot(slot, mode)

            monkeypatch.setattr(cuda_graphs.Slot, "run", run)
            for name, value in {
                "Stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
                "current_stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
                "stream": lambda stream: nullcontext(),
                "graph_pool_handle": lambda: None,
                "CUDAGraph": lambda: SimpleNamespace(again=None, replays=0),
                "graph": self.record,
            }.items():
                monkeypatch.setattr(f"torch.cuda.{name}", value)

        @contextmanager
        def record(self, graph: Any, **options: Any) -> Iterator[None]:
            assert set(options) == {"pool", "stream", "capture_error_mode"}

            def replay() -> None:
                graph.replays += 1
                graph.again()

            if self.fails:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            self.recording, graph.replay = graph, replay
            yield
            self.recording = None
            self.graphs.append(graph)

    def test_what_was_captured_is_replayed_for_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny("llama", **FEW)
        options = GenerationOptions(max_tokens=4)
        expected = answers(model, [options], -1)[0].tokens
        recorder = Recorder(monkeypatch)
        model.__dict__["fast_step"] = step_of(model)
        model.__dict__["graph_decoder"] = model.new_graph_decoder(model.fast_step, capture=True)
        assert model.decoding == "graph"
        for _ in range(2):
            assert answers(model, [options], -1)[0].tokens == expected
        (graph,) = recorder.graphs
        assert graph.replays == 6  # three steps of each answer; the first token is the prompt's

    def test_a_longer_table_of_angles_does_not_reach_steps_that_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
        """A step for another request makes it meanwhile.

        What was captured goes on reading its own, at the same address.
        """
        model = tiny("llama", **FEW)
        options = GenerationOptions(max_tokens=4)
        expected = answers(model, [options], -1)[0].tokens
        recorder = Recorder(monkeypatch)
        step = step_of(model)
        model.__dict__["graph_decoder"] = loop = model.new_graph_decoder(step, capture=True)
        going = run(model, [[5, 6, 7] * 4], [options], end_tokens=(), context=None)
        next(going)
        (slot,) = loop._slots.values()
        kept = slot.state.angles
        address = kept[None][0].data_ptr()
        nothing = torch.full((4096, 16), torch.nan)
        monkeypatch.setattr(type(step.family), "angles", lambda *given: (nothing, nothing))
        assert step.reach(4000)[None][0] is nothing
        assert [piece.done for piece in going if piece.done][-1].tokens == expected
        assert answers(model, [options], -1)[0].tokens == expected
        assert loop._slots[1] is slot
        assert kept[None][0].data_ptr() == address
        assert len(recorder.graphs) == 1  # nothing was captured again

    def test_what_cannot_be_captured_is_said_and_decoded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny("llama", **FEW)
        options = GenerationOptions(max_tokens=4)
        expected = answers(model, [options], -1)[0].tokens
        Recorder(monkeypatch, fails=True)
        model.__dict__["fast_step"] = step_of(model)
        model.__dict__["graph_decoder"] = loop = model.new_graph_decoder(model.fast_step, capture=True)
        with pytest.warns(UserWarning, match=r"operation not permitted when stream is capturing\)"):
            assert answers(model, [options], -1)[0].tokens == expected
        assert model.decoding == "lean"
        assert not loop.guard.locked()
        assert answers(model, [options], -1)[0].tokens == expected  # said once

    def test_a_smaller_batch_that_cannot_be_captured_goes_on_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
        """One sequence leaves, and memory, say, does not suffice to capture for the one that is left.

        Its answer is finished all the same.
        """
        model = tiny("llama", **FEW)
        options = [GenerationOptions(max_tokens=8), GenerationOptions(max_tokens=2)]
        expected = {row: done.tokens for row, done in answers(model, options, -1).items()}
        recorder = Recorder(monkeypatch)
        model.__dict__["fast_step"] = step_of(model)
        model.__dict__["graph_decoder"] = loop = model.new_graph_decoder(model.fast_step, capture=True)
        loop.prepare(options, 80)
        recorder.fails = True
        with pytest.warns(UserWarning, match="cannot be captured"):
            assert {row: done.tokens for row, done in answers(model, options, -1).items()} == expected
        assert sorted(loop._slots) == [1, 2]
        assert not loop._slots[1].graphs
        assert model.decoding == "lean"
        assert not loop.guard.locked()
