"""Rotate a model's weights: the same function, without outlier channels in the residual stream or the values.

QuaRot (arXiv 2404.00456), R1 and R2 of SpinQuant (2405.16406), without what they rotate at run time. Norm gains go into
the linears that read the norm; the residual stream is multiplied by an orthogonal matrix Q (embeddings, inputs of q, k,
v, gate, up and head, outputs of o and down), each head's values by another (outputs of v, inputs of o). A norm without
gain commutes with a rotation, so the function stays. down's inputs stay as they are: an elementwise product makes them.
A head that is tied to the embeddings becomes a matrix of its own, since the last norm's gain goes into it alone:
vocabulary x width numbers more.

Q is a Hadamard matrix of the stream's whole width with random signs; 576 = 16 (Sylvester's) x 36 (Paley's). Its entries
are all +-1/24, so each channel is spread over all others alike; blocks of 64 beside an orthogonal 9 x 9 would spread it
as unevenly as the 9 x 9's entries are.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.source import SeenSource, Source, TensorInfo
from quantkit.errors import NumericsError, UnsupportedModel
from quantkit.model.attention_shape import head_dim
from quantkit.model.skeleton import build_skeleton

# an RMSNorm before attention, one before the MLP; no other but q's and k's per head
FAMILIES = ("llama", "mistral", "qwen3")
SANDWICHED = ("gemma2", "gemma3", "gemma3_text", "olmo2", "olmo3", "glm4")  # norms after attention and MLP
HEAD_WISE = r"\.(q|k)_norm\.weight|\.(q|k)_proj\.bias"  # outputs of q and k: not rotated, their positions are
KNOWN = re.compile(
    r"(model\.embed_tokens|model\.norm|lm_head"
    r"|model\.layers\.\d+\.((input|post_attention)_layernorm|self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj))\.weight"
    rf"|model\.layers\.\d+\.self_attn({HEAD_WISE})"
)
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIGNS = 0  # seed
AT_ONCE = 1 << 21  # elements in float64
TOKENS = 64  # of the proof
LARGEST_DRIFT = 1e-3  # of a logit, in standard deviations of logits, in float32; 1e-5 is usual
PLUS = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
MINUS = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)


def hadamard(size: int) -> list[Tensor]:
    """Build float64 matrices of +-1 whose Kronecker product is a Hadamard matrix of that order.

    Sylvester's, then Paley's smallest that fits. Raises UnsupportedModel where these give none.
    """
    order = size // (size & -size)
    while order <= size:
        core = paley(order)
        if core is not None:
            factors, rest = ([core] if order > 1 else []), size // order
            while rest > 1:
                part = torch.ones(1, 1, dtype=torch.float64)
                while part.shape[0] < min(rest, 64):
                    part = torch.kron(PLUS, part)
                factors.insert(0, part)
                rest //= part.shape[0]
            return factors
        order *= 2
    raise UnsupportedModel(
        f"width {size}: Paley's and Sylvester's constructions give no Hadamard matrix of that order, so this model"
        " cannot be rotated."
    )


def paley(order: int) -> Tensor | None:
    """Build a Hadamard matrix (entries +-1) by Paley's constructions (1933); None if neither gives that order.

    They give order q + 1 for a prime q = 3 mod 4, and 2 (q + 1) for q = 1 mod 4.
    """
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    for q, remainder in ((order - 1, 3), (order // 2 - 1, 1)):
        if order % 4 == 0 and q % 4 == remainder and all(q % d for d in range(2, int(q**0.5) + 1)):
            squares = {i * i % q for i in range(1, q)}
            legendre = torch.tensor([0.0, *(1.0 if i in squares else -1.0 for i in range(1, q))], dtype=torch.float64)
            number = torch.arange(q)
            conference = torch.ones(q + 1, q + 1, dtype=torch.float64)
            conference[0, 0] = 0
            conference[1:, 1:] = legendre[(number[:, None] - number) % q]
            identity = torch.eye(q + 1, dtype=torch.float64)
            if remainder == 1:
                return torch.kron(conference, PLUS) + torch.kron(identity, MINUS)
            conference[1:, 0] = -1
            return conference + identity
    return None


def turn(x: Tensor, factors: list[Tensor]) -> Tensor:
    """Multiply ``x`` [..., n] by the orthonormal Kronecker product of the factors, without forming it."""
    lead = x.shape[:-1]
    y = x.reshape(*lead, *(f.shape[0] for f in factors))
    for f in factors:  # the axis in front becomes the last one: after all of them the order is the old one
        y = torch.tensordot(y, f, dims=([len(lead)], [0]))
    size = math.prod(f.shape[0] for f in factors)
    product: Tensor = y.reshape(x.shape) / size**0.5
    return product


def refuse(source: Source) -> None:
    """Raise UnsupportedModel, by name, for what a rotation of the weights cannot leave as it is."""
    kind = source.config.get("model_type")
    if kind in SANDWICHED:
        raise UnsupportedModel(
            f"{source.path}: model type {kind} has norms after attention and MLP. Their gains act channel by channel on"
            " what is added to the residual stream: no linear comes between, which could take them over, and they do"
            " not commute with a rotation. Quantize it without one."
        )
    if kind not in FAMILIES:
        raise UnsupportedModel(
            f"{source.path}: model type {kind} is none of {', '.join(FAMILIES)}, for which rotations are proved."
            " Quantize it without one."
        )
    unknown = [name for name in source.names() if not KNOWN.fullmatch(name)]
    if unknown:
        biases = (
            " (a bias has to be rotated with its linear's outputs; not done)" if unknown[0].endswith("bias") else ""
        )
        raise UnsupportedModel(
            f"{source.path}: no rotation is known for {unknown[0]}{biases}; {len(unknown)} such tensors. Quantize it"
            " without one."
        )


class RotatedSource(SeenSource):
    """A source whose tensors are those of the rotated model, one at a time.

    They are computed in float64 and rounded to the dtype that is stored. Rounding moves a weight by at most 2**-11
    (float16) or 2**-8 (bfloat16) of itself; 4 bits move it by a tenth.
    """

    def __init__(self, original: Source, seed: int = SIGNS) -> None:
        """Reads no weights. Raises UnsupportedModel (see ``refuse``)."""
        refuse(original)
        super().__init__(original)
        self.seed = seed
        self.config: dict[str, Any] = {**original.config, "tie_word_embeddings": False}
        width = int(self.config["hidden_size"])
        self._width = width
        self._stream = hadamard(width)
        self._head = hadamard(head_dim(SimpleNamespace(**self.config)))
        signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self._signs = signs.double()

    @property
    def untied(self) -> bool:
        """True if the original stores no head of its own."""
        return HEAD not in self.original.names()

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.original.names(), HEAD]))

    def info(self, name: str) -> TensorInfo:
        return self.original.info(self._stored(name))

    def read(self, name: str) -> Tensor:
        return self.exact(name, self.info(name).dtype)

    def digest(self) -> str:
        return hashlib.sha256(f"{self.original.digest()} rotated {self.seed}".encode()).hexdigest()

    def quantization(self) -> dict[str, Any] | None:
        return self.original.quantization()

    def _stored(self, name: str) -> str:
        """The original's tensor: a head that was tied is the embeddings."""
        return EMBEDDINGS if name == HEAD and self.untied else name

    def exact(self, name: str, dtype: torch.dtype = torch.float32, rows: Tensor | None = None) -> Tensor:
        """Compute one rotated tensor (or some rows of embeddings or head) in float64, rounded once."""
        tensor = self.original.read(self._stored(name))
        kind = name.split(".")[-2]
        if tensor.dim() == 1:
            gain = tensor.shape == (self._width,) and not re.search(HEAD_WISE, name)
            return (torch.ones_like(tensor) if gain else tensor).to(dtype)  # a gain is in what reads the norm
        if rows is not None:
            tensor = tensor[rows]
        out = torch.empty(tensor.shape, dtype=dtype)
        if kind in ("o_proj", "down_proj"):
            for part in self._parts(tensor.shape[1], tensor.shape[0]):
                block = turn(tensor[:, part].T.double() * self._signs, self._stream).T
                out[:, part] = self._by_head(block) if kind == "o_proj" else block
            return out
        norm = norm_of(name)
        scale = self._signs if norm is None else self._signs * self.original.read(norm).double()
        for part in self._parts(tensor.shape[0], tensor.shape[1]):
            block = turn(tensor[part].double() * scale, self._stream)
            out[part] = self._by_head(block.T).T if kind == "v_proj" else block
        return out

    def _parts(self, total: int, other: int) -> list[slice]:
        """Pieces of ``total`` rows or columns of so many elements each: whole heads, small in float64."""
        size = math.prod(f.shape[0] for f in self._head)
        step = max(1, AT_ONCE // (other * size)) * size
        return [slice(begin, min(begin + step, total)) for begin in range(0, total, step)]

    def _by_head(self, x: Tensor) -> Tensor:
        """``x`` [..., heads x head_dim], each head turned."""
        size = math.prod(f.shape[0] for f in self._head)
        return turn(x.unflatten(-1, (-1, size)), self._head).flatten(-2)


def norm_of(name: str) -> str | None:
    """Name the norm that a linear reads; None for those that read none, and for what is no linear."""
    layer, _, kind = name.removesuffix(".weight").rpartition(".")
    if kind == "lm_head":
        return "model.norm.weight"
    if kind in ("q_proj", "k_proj", "v_proj") and name.endswith("weight"):
        return layer.replace("self_attn", "input_layernorm.weight")
    if kind in ("gate_proj", "up_proj"):
        return layer.replace("mlp", "post_attention_layernorm.weight")
    return None


def prove(source: RotatedSource) -> float:
    """Run the first and the last block, with embeddings and head, of both models on a few tokens in float32.

    Returns the largest change of a logit in standard deviations of the logits, before rounding to the stored dtype.

    Raises NumericsError if it is above LARGEST_DRIFT: then nothing may be written.
    """
    ids = torch.linspace(0, source.info(EMBEDDINGS).shape[0] - 1, TOKENS).long()

    def original(name: str, rows: Tensor | None) -> Tensor:
        tensor = source.original.read(source._stored(name))
        return (tensor if rows is None else tensor[rows]).float()

    def rotated(name: str, rows: Tensor | None) -> Tensor:
        return source.exact(name, rows=rows)

    before, after = (_logits(source.config, ids, read) for read in (original, rotated))
    drift = float((after - before).abs().max() / before.std())
    if not drift <= LARGEST_DRIFT:
        raise NumericsError(
            f"{source.path}: its rotated weights do not compute what its own do (a logit changes by {drift:.2g}"
            " standard deviations in two blocks). Quantize it without --rotate, and report this."
        )
    return drift


@torch.no_grad()
def _logits(config: dict[str, Any], ids: Tensor, read: Callable[[str, Tensor | None], Tensor]) -> Tensor:
    """Logits of a model cut to its first and last block and to the tokens ``ids``, each read once."""
    last = int(config["num_hidden_layers"]) - 1
    blocks = sorted({0, last})
    cut = {**config, "num_hidden_layers": len(blocks), "vocab_size": len(ids), "pad_token_id": None}
    if cut.get("layer_types"):
        cut["layer_types"] = [config["layer_types"][index] for index in blocks]
    model = build_skeleton(cut)
    for name, _ in list(model.named_parameters()):
        stored = re.sub(r"layers\.(\d+)\.", lambda match: f"layers.{blocks[int(match[1])]}.", name)
        owner = model.get_submodule(name.rpartition(".")[0])
        value = read(stored, ids if name in (EMBEDDINGS, HEAD) else None)
        owner._parameters[name.rpartition(".")[2]] = nn.Parameter(value, requires_grad=False)
    logits: Tensor = model(input_ids=torch.arange(len(ids))[None], use_cache=False).logits
    return logits
