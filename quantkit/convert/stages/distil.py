"""The end-to-end pass after the blocks: scales and norms learn the original's distribution, codes stay.

The arithmetic is in ``algorithms.distil``. One step takes a few windows through all blocks and back. Memory does not
grow with the model beyond its packed size: of a step only the states in front of each block are kept, and each block
runs again on the way back (activation checkpointing, Chen et al., arXiv 1604.06174). Weights are made float when they
are used, from codes that are held, or read again each time where they would take much of the free memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.algorithms import distil as algorithm
from quantkit.algorithms.distil import DistilOptions, divergence, rate_at
from quantkit.calibrate.capture import advance
from quantkit.calibrate.data import CalibrationWindows
from quantkit.calibrate.matmul_precision import model_runs
from quantkit.convert.job.states import StateStore
from quantkit.convert.results import BlockResult
from quantkit.convert.stages.embed import embed, require_one_call
from quantkit.convert.stages.loaded_block import loaded
from quantkit.convert.stages.student import Student, Written
from quantkit.core.host import release_free_memory
from quantkit.model.arguments import BlockArguments
from quantkit.model.language import text_config
from quantkit.model.stepper import forward_norm, given, gradients_in_order
from quantkit.runtime.layers.build import load_parameters
from quantkit.runtime.layers.head import head_only

PART = "distilled"
MOMENTS = ("exp_avg", "exp_avg_sq")

OnDistil = Callable[[str, int, int, str], None]  # called with: stage, steps done, steps in all, a note


def distil(
    written: Written, windows: CalibrationWindows, listen: OnDistil, *, states: StateStore, resumed: bool
) -> BlockResult:
    """Learn scales and norms end to end; return the tensors that changed, and the divergence before and after.

    Everything else of the model must have been written. If the divergence on the windows kept back does not fall or is
    not finite, nothing changes, and the result's notes give the reason.

    written: the quantized model as it was written.
    windows: the text to learn from; the last windows are kept back to judge the outcome.
    listen: called with the progress of the pass.
    states: the store in the work folder that a killed pass resumes from.
    resumed: take up what an earlier process left in ``states``.
    """
    with torch.enable_grad(), model_runs(written.device):
        return _Pass(written, windows, listen, states, resumed).run()


class _NotFinite(Exception):
    """A divergence is NaN or infinite; its argument is the number of the step."""


class _Pass:
    """The training: windows, the original's final states, steps, and the comparison at the end."""

    def __init__(
        self, written: Written, windows: CalibrationWindows, listen: OnDistil, states: StateStore, resumed: bool
    ) -> None:
        self.written, self.listen, self.store, self.resumed = written, listen, states, resumed
        self.options = DistilOptions()
        size = algorithm.window_batch(*windows.ids.shape)
        order = torch.randperm(len(windows.ids), generator=torch.Generator().manual_seed(windows.seed))
        ids = windows.ids[order[: len(order) // size * size]]
        self.batches = list(ids.split(size))
        self.held = max(1, len(self.batches) // algorithm.HELD)
        self.steps = len(self.batches) - self.held
        with torch.no_grad():
            self.student = Student(written)
            self.head_embeddings = self.student.head_embedding_weights()
            self.states, calls = self._embedded(ids, {})
            self.calls = [call.to(written.device) for call in calls]
            original = self.states
            if any(
                target.kind != "head" for target in written.head_embeddings()
            ):  # the quantized model starts from other embeddings
                self.states = self._embedded(ids, self.head_embeddings)[0]
            else:
                self.states = [state.clone() for state in original]
            self.targets = self._original(original)
        self.adam = torch.optim.Adam(self.student.parameters(), lr=self.options.rate, betas=self.options.betas)

    def run(self) -> BlockResult:
        """Train from the last kept step, and return the changed tensors if the divergence fell."""
        result = BlockResult()
        done = 0
        before: float | None = None
        after: float | None = None  # not known where the pass broke off
        try:
            with gradients_in_order(self.written.device):
                before = self._judge()
                done = self._resume()
                for step in range(done, self.steps):
                    self._step(step)
                    self._keep(done := step + 1)
                self.listen("distil", self.steps, self.steps, "")
                after = self._judge(rounded=True)
        except _NotFinite as error:  # an hour's blocks stand behind this: they are worth keeping
            result.notes.append(f"--distil: the divergence of step {error} is not finite; nothing was changed")
        kept = before is not None and after is not None and after < before
        size, window = self.batches[0].shape
        result.distilled = {
            "steps": done, "windows_learned": done * size, "tokens_learned": done * size * window,
            "windows_kept_back": self.held * size,
            "kl_before": before, "kl_after": after, "kept": kept,
        }  # fmt: skip
        if kept:
            self.student.collect(result)
        elif not result.notes:
            result.notes.append(
                f"--distil: the windows kept back have a divergence of {after:.4f} after it and {before:.4f} before;"
                " nothing was changed"
            )
        return result

    def _embedded(self, ids: Tensor, head_embeddings: dict[str, Tensor]) -> tuple[list[Tensor], list[BlockArguments]]:
        """Return states in front of block 0, one tensor per step, and every block's arguments."""
        written, tokens = self.written, self.batches[0].numel()
        embedded = embed(
            written.model, written.blocks, written.weights, ids, written.device, None, tokens, head_embeddings
        )
        require_one_call(embedded.calls, "--distil")
        return embedded.states, embedded.calls

    def _original(self, states: list[Tensor]) -> list[Tensor]:
        """Advance states in front of the original's first block to its final hidden states, block by block.

        Head, final norm and embeddings are loaded afterwards, and stay.
        """
        written = self.written
        for index in range(len(written.blocks)):
            self.listen("original", index, len(written.blocks), "")
            with loaded(written.weights, written.blocks, index, written.device) as block:
                advance(block, states, self.calls[index])
        self.listen("original", len(written.blocks), len(written.blocks), "")
        plain = [name for name in written.weights.parameters if not name.startswith(f"{written.blocks.prefix}.")]
        load_parameters(written.model, written.weights, plain, written.device)
        for step, state in enumerate(states):
            states[step] = forward_norm(
                written.model, written.blocks, self.batches[step].to(written.device), state.to(written.device)
            ).cpu()
        return states

    def _step(self, step: int) -> None:
        """Do one step of Adam."""
        for group in self.adam.param_groups:
            group["lr"] = rate_at(step, self.steps, self.options)
        crossed: list[Tensor] = []
        hidden = self.states[step].to(self.written.device)
        with torch.no_grad():  # the way back runs each block again
            for index, call in enumerate(self.calls):
                crossed.append(hidden)
                hidden = self.student.forward(index, hidden, call)
        loss, grad = self._tail(step, hidden)
        self.listen("distil", step, self.steps, f"divergence {loss:.4f}")
        for index in range(len(crossed) - 1, -1, -1):
            hidden = crossed.pop().detach().requires_grad_(index > 0)
            torch.autograd.backward(self.student.forward(index, hidden, self.calls[index]), grad)
            grad = hidden.grad if index > 0 else grad  # type: ignore[assignment]
        for p in (
            self.student.parameters()
        ):  # an expert that no token reached learns nothing, but has its place in the record
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self.adam.step()
        self.adam.zero_grad()
        release_free_memory()  # what learns lies between what was freed: the heap would grow with every step

    def _tail(self, step: int, hidden: Tensor) -> tuple[float, Tensor]:
        """Return the divergence of one step's windows, and its gradient for the last block's output."""
        written, ids = self.written, self.batches[step].to(self.written.device)
        leaf = hidden.detach().requires_grad_(torch.is_grad_enabled())
        with given(written.model, {name: norm.value() for name, norm in self.student.norms.items()}):
            final = forward_norm(written.model, written.blocks, ids, leaf)
        target = self.targets[step].to(written.device)
        vocab = int(text_config(written.model).vocab_size)
        loss, grad = divergence(
            final.detach().flatten(0, 1), target.flatten(0, 1), self._head, self._original_head, vocab
        )
        if not math.isfinite(loss):
            raise _NotFinite(step)
        if leaf.requires_grad:
            final.backward(grad.view_as(final))
            assert leaf.grad is not None
            return loss, leaf.grad
        return loss, leaf

    def _original_head(self, final: Tensor) -> Tensor:
        logits: Tensor = head_only(self.written.model)(inputs_embeds=final[None], use_cache=False).logits[0]
        return logits

    def _head(self, final: Tensor) -> Tensor:
        with given(self.written.model, self._quantized_head()):
            return self._original_head(final)

    def _quantized_head(self) -> dict[str, Tensor]:
        """Return the head's written weight where that is quantized; a tied matrix under both of its names."""
        tied = {
            name: self.head_embeddings[twin]
            for name, twin in self.written.weights.tied.items()
            if twin in self.head_embeddings
        }
        return {**self.head_embeddings, **tied}

    @torch.no_grad()
    def _judge(self, rounded: bool = False) -> float:
        """Return the divergence on the windows kept back.

        rounded: with scales and norms as they will be stored.
        """
        exact = [p.clone() for p in self.student.parameters()] if rounded else []
        if rounded:
            self.student.round_()
        total = 0.0
        for step in range(self.steps, len(self.states)):
            hidden = self.states[step].to(self.written.device)
            for index, call in enumerate(self.calls):
                hidden = self.student.forward(index, hidden, call)
            total += self._tail(step, hidden)[0]
        for p, value in zip(self.student.parameters(), exact, strict=False):
            p.copy_(value)
        return total / self.held

    def _keep(self, done: int) -> None:
        """Store now and then what a resumed job goes on from. The states' file is free: the blocks are done."""
        learned = self.student.parameters()
        moments = [self.adam.state[p][name] for p in learned for name in MOMENTS]
        self.store.keep(len(self.calls) + done, [t.detach().cpu().contiguous() for t in (*learned, *moments)])

    def _resume(self) -> int:
        """Load what an earlier process learned; return how many steps it did."""
        learned = self.student.parameters()
        wanted = [p.shape for p in learned] + [p.shape for p in learned for _ in MOMENTS]
        # up to the number of blocks they are hidden states, of the loop before
        blocks = len(self.calls)
        stored = self.store.latest(blocks + self.steps, wanted.__eq__, blocks) if self.resumed else None
        if stored is None:
            return 0
        done = stored[0] - len(self.calls)
        values = iter(stored[1])
        with torch.no_grad():
            for p in learned:
                p.copy_(next(values))
        for p in learned:
            moments = {name: next(values).to(p.device) for name in MOMENTS}
            self.adam.state[p] = {"step": torch.tensor(float(done)), **moments}
        return done
