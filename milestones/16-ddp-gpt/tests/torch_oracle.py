"""Compares a loss and its gradients with PyTorch's, computed in float64.

    python3 torch_oracle.py FOLDER

tests/torch.rs writes the folder: case.json, and raw little-endian numbers in weights.f32, gradients.f32, tokens.u32,
targets.u32 and masks.f32 (dropout's factors, in the order in which they apply). Exits with 1 at the first tensor that differs.
"""

import array
import json
import math
import pathlib
import sys

import torch

# Relative to PyTorch's gradient, whose own rounding is far below. f32 is off by less than 1e-6 here.
TOLERANCE = 1e-5


def read(path, code):
    values = array.array(code, path.read_bytes())
    if sys.byteorder == "big":
        values.byteswap()
    return torch.tensor(values.tolist(), dtype=torch.float64 if code == "f" else torch.int64)


def tensors(case, path):
    shapes = [tensor["shape"] for tensor in case["tensors"]]
    parts = read(path, "f").split([math.prod(shape) for shape in shapes])
    return {tensor["name"]: part.reshape(shape) for tensor, part, shape in zip(case["tensors"], parts, shapes)}


def norm(x, weight):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(qkv, heads, drop):
    samples, context, width = qkv.shape
    q, k, v = (
        part.reshape(samples, context, heads, -1).transpose(1, 2) for part in qkv.split(width // 3, dim=-1)
    )
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(context, context, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return (drop(weights) @ v).transpose(1, 2).reshape(samples, context, -1)


def dropout(masks):
    """Applies the next masks of a flat list to each tensor that it is called with."""
    used = 0

    def drop(x):
        nonlocal used
        mask = masks[used : used + x.numel()].reshape(x.shape)
        used += x.numel()
        return x * mask

    return drop


def loss_of(w, case, tokens, targets, masks):
    drop = dropout(masks)
    x = drop(w["wte.weight"][tokens] + w["wpe.weight"][: case["context"]])
    for layer in range(case["layers"]):
        h = f"h.{layer}."
        qkv = norm(x, w[h + "ln_1.weight"]) @ w[h + "attn.c_attn.weight"].T
        x = x + drop(attention(qkv, case["heads"], drop) @ w[h + "attn.c_proj.weight"].T)
        hidden = norm(x, w[h + "ln_2.weight"]) @ w[h + "mlp.c_fc.weight"].T
        x = x + drop(gelu(hidden) @ w[h + "mlp.c_proj.weight"].T)
    logits = norm(x, w["ln_f.weight"]) @ w["wte.weight"].T
    return -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()


def check(name, ours, expected):
    difference = ours - expected
    error, length = difference.norm().item(), expected.norm().item()
    worst, largest = difference.abs().max().item(), expected.abs().max().item()
    line = f"norm {length:.3e}, off by {error / length:.1e} of it; "
    line += f"largest {largest:.3e}, worst difference {worst:.1e}"
    # Written so that NaN fails.
    if not (error <= TOLERANCE * length and worst <= TOLERANCE * largest):
        sys.exit(f"{name} differs from PyTorch: {line}; allowed is {TOLERANCE} of each")
    print(f"{name:24} {line}")


def main():
    folder = pathlib.Path(sys.argv[1])
    case = json.loads((folder / "case.json").read_text())
    tokens, targets = (
        read(folder / name, "I").reshape(case["samples"], case["context"]) for name in ("tokens.u32", "targets.u32")
    )
    weights = tensors(case, folder / "weights.f32")
    for weight in weights.values():
        weight.requires_grad_()
    loss = loss_of(weights, case, tokens, targets, read(folder / "masks.f32", "f"))
    loss.backward()

    check("loss", torch.tensor(case["loss"], dtype=torch.float64), loss.detach())
    # In the order of the backward pass: the first tensor that differs is the one closest to the mistake.
    for name, ours in reversed(tensors(case, folder / "gradients.f32").items()):
        check(name, ours, weights[name].grad)


main()
