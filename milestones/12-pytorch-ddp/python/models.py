"""The models and their data: the network of milestone 13, and a small GPT over the text of this checkout."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

MASK = (1 << 64) - 1


class Rng:
    """splitmix64, as in milestone 13: the same seed gives the same data and the same order."""

    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def uniform(self):
        return (self.next() >> 40) / (1 << 24)

    def normal(self):
        radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform()))
        return radius * math.cos(2.0 * math.pi * self.uniform())

    def permutation(self, n):
        order = list(range(n))
        for i in range(n - 1, 0, -1):
            j = self.next() % (i + 1)
            order[i], order[j] = order[j], order[i]
        return order


def spiral(per_class, seed):
    """Three spiral arms: (points, labels)."""
    rng, points, labels = Rng(seed), [], []
    for label in range(3):
        for i in range(per_class):
            radius = (i + 0.5) / per_class
            angle = 2.0 * math.pi * (label / 3 + 0.66 * radius) + 0.15 * rng.normal()
            points.append((radius * math.cos(angle), radius * math.sin(angle)))
            labels.append(label)
    return torch.tensor(points), torch.tensor(labels)


def epoch_order(samples, seed, epoch):
    return Rng(seed ^ ((epoch + 1) * 0xD1342543DE82EF95 & MASK)).permutation(samples)


def mlp(hidden, seed):
    """2 -> hidden -> hidden -> 3 with tanh in between; weights normal with variance 1 / inputs, biases 0."""
    rng, layers = Rng(seed), []
    for inputs, outputs in [(2, hidden), (hidden, hidden), (hidden, 3)]:
        layer = nn.Linear(inputs, outputs)
        scale = 1.0 / math.sqrt(inputs)
        weights = [scale * rng.normal() for _ in range(inputs * outputs)]
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(weights).view(outputs, inputs))
            layer.bias.zero_()
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A decoder over bytes: learned positions, layer norm first."""

    def __init__(self, layers, width, heads, context):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text():
    """The Markdown of this checkout, as bytes."""
    root = Path(__file__).resolve().parents[3]
    files = sorted([*root.glob("*.md"), *root.glob("milestones/*/README.md")])
    return torch.tensor(list(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
