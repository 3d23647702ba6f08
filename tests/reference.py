"""The equations of "Attention Is All You Need", written down naively; the yardstick of the model's tests.

One sentence at a time and so without padding or masks, one head at a time, one position at a time, in float64.
Written from the paper alone: nothing of the package is imported, and no layer, attention or loss function of torch,
which gives arithmetic and derivatives only. Weights go by the names of a checkpoint; W^Q of head i are the i-th d_k
rows of `q_proj`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


def position_encoding(position: int, d_model: int) -> list[float]:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d_model)) (section 3.5)."""
    encoding = []
    for i in range(d_model // 2):
        angle = position / 10000 ** (2 * i / d_model)
        encoding += [math.sin(angle), math.cos(angle)]
    return encoding


def position_encoding_tensor2tensor(position: int, d_model: int) -> list[float]:
    """Return tensor2tensor's timing signal: sines, then cosines, timescales 1 ... 10000 with both ends included."""
    half = d_model // 2
    angles = [position / 10000 ** (i / (half - 1)) for i in range(half)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise a vector to mean 0 and variance 1, then scale and shift (Ba et al. 2016)."""
    mean = x.sum() / len(x)
    variance = ((x - mean) * (x - mean)).sum() / len(x)
    return (x - mean) / (variance + eps) ** 0.5 * gain + bias


def softmax(scores: list[Tensor]) -> list[Tensor]:
    exponentials = [torch.exp(score - max(scores).detach()) for score in scores]
    return [exponential / sum(exponentials) for exponential in exponentials]


def relu(x: Tensor) -> Tensor:
    return x * (x > 0)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def smoothed_loss(logits: Tensor, labels: list[int], epsilon: float) -> Tensor:
    """Mean over positions of -sum_v q_v log p_v with q = (1 - ε) onehot + ε / V (section 5.4; Szegedy et al. 2016)."""
    total = torch.zeros((), dtype=logits.dtype)
    num_classes = logits.shape[1]
    for row, label in zip(logits, labels, strict=True):
        log_sum = torch.log(torch.exp(row - row.max()).sum()) + row.max()
        for v in range(num_classes):
            q = epsilon / num_classes + (1 - epsilon if v == label else 0.0)
            total = total - q * (row[v] - log_sum)
    return total / len(labels)


@dataclass
class Transformer:
    """The encoder-decoder Transformer of section 3.

    Args:
        weights: Weights by their names in a checkpoint; biases that are missing are zero.
        d_model: Width.
        layers: Encoder and decoder layers.
        heads: Encoder and decoder heads.
        pre_norm: x + Sublayer(LayerNorm(x)) in place of the paper's LayerNorm(x + Sublayer(x)), with final norms.
        activation: Of the feed-forward layers.
        positions: Maps (position, d_model) to an encoding, or None for learned ones.
        scale: Multiply embeddings by sqrt(d_model).
        eps: Of LayerNorm.
        position_offset: Added to each position.
    """

    weights: dict[str, Tensor]
    d_model: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    pre_norm: bool = False
    activation: Callable[[Tensor], Tensor] = relu
    positions: Callable[[int, int], list[float]] | None = position_encoding
    scale: bool = True
    eps: float = 1e-6
    position_offset: int = 0

    def logits(self, source: list[int], target: list[int]) -> Tensor:
        """Return a row of logits for each of the target's (shifted) tokens."""
        memory = self.encode(source)
        states = self._embed("decoder", target)
        for n in range(self.layers[1]):
            name = f"model.decoder.layers.{n}"
            causal = partial(self._attend, f"{name}.self_attn", self.heads[1], lambda xs, t: xs[: t + 1])
            states = self._sublayer(states, f"{name}.self_attn_layer_norm", causal)
            cross = partial(self._attend, f"{name}.encoder_attn", self.heads[1], lambda xs, t: memory)
            states = self._sublayer(states, f"{name}.encoder_attn_layer_norm", cross)
            states = self._sublayer(states, f"{name}.final_layer_norm", partial(self._feed_forward, name))
        states = self._last_norm(states, "decoder")
        rows = [self.weights["lm_head.weight"] @ x for x in states]
        bias = self.weights.get("final_logits_bias")
        return torch.stack([row if bias is None else row + bias.flatten() for row in rows])

    def encode(self, source: list[int]) -> list[Tensor]:
        """Return the encoder's output, a vector for each source token."""
        states = self._embed("encoder", source)
        for n in range(self.layers[0]):
            name = f"model.encoder.layers.{n}"
            attend = partial(self._attend, f"{name}.self_attn", self.heads[0], lambda xs, t: xs)
            states = self._sublayer(states, f"{name}.self_attn_layer_norm", attend)
            states = self._sublayer(states, f"{name}.final_layer_norm", partial(self._feed_forward, name))
        return self._last_norm(states, "encoder")

    def _embed(self, side: str, tokens: list[int]) -> list[Tensor]:
        table = self.weights[f"model.{side}.embed_tokens.weight"]
        scale = math.sqrt(self.d_model) if self.scale else 1.0
        states = []
        for place, token in enumerate(tokens):
            position = place + self.position_offset
            if self.positions is None:
                encoding = self.weights[f"model.{side}.embed_positions.weight"][position]
            else:
                encoding = torch.tensor(self.positions(position, self.d_model), dtype=torch.float64)
            states.append(table[token] * scale + encoding)
        return states

    def _linear(self, name: str, x: Tensor) -> Tensor:
        product = self.weights[f"{name}.weight"] @ x
        bias = self.weights.get(f"{name}.bias")
        return product if bias is None else product + bias

    def _attention(self, name: str, heads: int, x: Tensor, others: list[Tensor]) -> Tensor:
        """Let one position attend to `others`: Concat(head_1, ..., head_h) W^O (section 3.2.2)."""
        query = self._linear(f"{name}.q_proj", x)
        keys = [self._linear(f"{name}.k_proj", other) for other in others]
        values = [self._linear(f"{name}.v_proj", other) for other in others]
        d_k, d_v = len(query) // heads, len(values[0]) // heads
        outputs = []
        for head in range(heads):
            q = query[head * d_k : (head + 1) * d_k]
            scores = [(q * key[head * d_k : (head + 1) * d_k]).sum() / math.sqrt(d_k) for key in keys]
            weights = softmax(scores)
            parts = [w * value[head * d_v : (head + 1) * d_v] for w, value in zip(weights, values, strict=True)]
            outputs.append(sum(parts))
        return self._linear(f"{name}.out_proj", torch.cat(outputs))

    def _attend(
        self, name: str, heads: int, seen: Callable[[list[Tensor], int], list[Tensor]], states: list[Tensor]
    ) -> list[Tensor]:
        """Let each position t attend to the vectors `seen(states, t)`."""
        return [self._attention(name, heads, x, seen(states, t)) for t, x in enumerate(states)]

    def _feed_forward(self, name: str, states: list[Tensor]) -> list[Tensor]:
        """FFN(x) = max(0, x W1 + b1) W2 + b2 (section 3.3)."""
        inner = [self.activation(self._linear(f"{name}.fc1", x)) for x in states]
        return [self._linear(f"{name}.fc2", x) for x in inner]

    def _sublayer(
        self, states: list[Tensor], norm: str, function: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        if self.pre_norm:
            outputs = function([self._norm(x, norm) for x in states])
            return [x + y for x, y in zip(states, outputs, strict=True)]
        return [self._norm(x + y, norm) for x, y in zip(states, function(states), strict=True)]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], self.eps)

    def _last_norm(self, states: list[Tensor], side: str) -> list[Tensor]:
        return [self._norm(x, f"model.{side}.layer_norm") for x in states] if self.pre_norm else states
