"""Operations of released libraries whose Triton kernels are autotuned, for `triton_programs.py`.

A program makes its inputs from a fixed seed and returns a function that runs one step; a step returns its results and
gradients by name. Libraries are imported inside of the programs: each process has one of them.
"""

# ruff: noqa: PLC0415, N803 - each process imports one library; sizes are written as the authors write them

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

CUDA = {"device": "cuda", "dtype": torch.bfloat16}


@dataclass(frozen=True)
class Program:
    """An operation of a library."""

    package: str  # the name on the package index
    make: Callable[..., Callable[[], dict[str, torch.Tensor]]]
    backward: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    other: dict[str, int] | None = None  # arguments of `make` for a problem that compiles anew
    tolerance: float = 2e-2  # of the norm; configurations add up in another order


def with_gradients(forward, *inputs):
    """Return a step that runs forward and backward."""
    gradient = None

    def step():
        nonlocal gradient
        for x in inputs:
            x.grad = None
        out = forward()
        if gradient is None:
            torch.manual_seed(1)
            gradient = torch.randn_like(out) if out.dim() else torch.ones_like(out)
        out.backward(gradient)
        return {"out": out.detach(), **{f"grad {i}": x.grad for i, x in enumerate(inputs)}}

    return step


def leaves(*shapes, scale=1.0, **options):
    """Return random tensors that want gradients."""
    return [(torch.randn(*shape, **{**CUDA, **options}) * scale).requires_grad_() for shape in shapes]


def gated_linear_attention(B=4, T=2048, H=16, D=128):
    from fla.ops.gla import chunk_gla

    q, k, v = leaves(*[(B, T, H, D)] * 3)
    gate = torch.nn.functional.logsigmoid(torch.randn(B, T, H, D, **CUDA)).requires_grad_()
    return with_gradients(lambda: chunk_gla(q, k, v, gate)[0], q, k, v, gate)


def retention(B=4, T=2048, H=16, D=128):
    from fla.ops.retention import chunk_retention

    q, k, v = leaves(*[(B, T, H, D)] * 3)
    return with_gradients(lambda: chunk_retention(q, k, v)[0], q, k, v)


def dynamic_tanh(rows=8192, columns=4096):
    from liger_kernel.ops.dyt import LigerDyTFunction

    x, gamma, beta = leaves((rows, columns), (columns,), (columns,))
    (alpha,) = leaves((1,))
    return with_gradients(lambda: LigerDyTFunction.apply(x, alpha, gamma, beta), x, gamma, beta)


def swiglu_mlp(tokens=4096, dim=2048, hidden=4096):
    from liger_kernel.ops.mlp import LigerMLPFunction

    x, gate, up, down = leaves((1, tokens, dim), (hidden, dim), (hidden, dim), (dim, hidden), scale=0.05)
    return with_gradients(lambda: LigerMLPFunction.apply(x, gate, up, down), x, gate, up, down)


def linear_4_bits(size=4096, group=128, rows=(1, 64)):
    from gemlite.core import DType, GemLiteLinear

    weights = torch.randint(0, 16, (size, size), dtype=torch.uint8, device="cuda")
    scales = torch.rand(size * size // group, 1, device="cuda", dtype=torch.float16) * 0.01
    zeros = torch.full((size * size // group, 1), 8.0, device="cuda", dtype=torch.float16)
    linear = GemLiteLinear(4, group, size, size, input_dtype=DType.FP16, output_dtype=DType.FP16)
    linear.pack(weights, scales, zeros, None)
    inputs = [torch.randn(m, size, device="cuda", dtype=torch.float16) for m in rows]
    return lambda: {f"{m} rows": linear(x) for m, x in zip(rows, inputs, strict=True)}


def normalized_rows(B=2, T=4096, H=16, D=128):
    from attn_gym.linear.kda.fwd.triton.l2norm_fwd import l2norm

    (x,) = leaves((B, T, H, D))
    return with_gradients(lambda: l2norm(x), x)


def recurrent_delta_rule(B=8, T=256, H=16, D=128):
    from attn_gym.linear._delta_rule.recurrent import GateKind, launch_recurrent_delta_rule_fwd

    q, k, v = (torch.nn.functional.normalize(torch.randn(B, T, H, D, **CUDA), dim=-1) for _ in range(3))
    gate = torch.nn.functional.logsigmoid(torch.randn(B, T, H, device="cuda"))
    beta = torch.rand(B, T, H, device="cuda")

    def step():
        out, state = launch_recurrent_delta_rule_fwd(
            q, k, v, gate, beta, None, None, scale=D**-0.5, gate_kind=GateKind.SCALAR, store_final_state=True,
            autotune=True,
        )  # fmt: skip
        return {"out": out, "state": state}

    return step


def scaled_int8_matmul(m=2048, n=2048, k=2048):
    from torchao.prototype.quantized_training.int8_mm import scaled_int8_mm

    a = torch.randint(-128, 127, (m, k), dtype=torch.int8, device="cuda")
    b = torch.randint(-128, 127, (n, k), dtype=torch.int8, device="cuda").T
    rows, columns = (torch.rand(size, **CUDA) * 1e-3 for size in (m, n))
    return lambda: {"out": scaled_int8_mm(a, b, rows, columns)}


def blockwise_float8(m=2048, n=2048, k=2048):
    from torchao.kernel.blockwise_quantization import (
        blockwise_fp8_gemm,
        fp8_blockwise_act_quant,
        fp8_blockwise_weight_quant,
    )

    a, b = torch.randn(m, k, **CUDA), torch.randn(n, k, **CUDA)

    def step():
        left, left_scale = fp8_blockwise_act_quant(a)
        right, right_scale = fp8_blockwise_weight_quant(b)
        return {"out": blockwise_fp8_gemm(left, left_scale, right, right_scale)}

    return step


def mlstm(B=2, H=8, T=1024, D=64):
    from mlstm_kernels.torch.parallel.triton_limit_headdim import mlstm_parallel__limit_headdim

    q, k, v = leaves(*[(B, H, T, D)] * 3, dtype=torch.float32)
    gate_in, gate_forget = leaves(*[(B, H, T)] * 2, dtype=torch.float32)
    forward = lambda: mlstm_parallel__limit_headdim(  # noqa: E731 - one of many
        q, k, v, gate_in, gate_forget + 4, autocast_kernel_dtype=torch.bfloat16
    )
    return with_gradients(forward, q, k, v, gate_in)


def attention_with_rotation(B=2, H=8, T=1024, D=64):
    from rotary_embedding_torch.flash_attn_with_rotary import flash_attn_with_rotary

    q, k, v = leaves(*[(B, H, T, D)] * 3, dtype=torch.float16)
    angles = torch.rand(T, D, device="cuda", dtype=torch.float16)
    return with_gradients(lambda: flash_attn_with_rotary(q, k, v, rotary_pos_emb=angles), q, k, v)


def cross_entropy(tokens=4096, dim=1024, words=32768):
    from cut_cross_entropy import linear_cross_entropy

    hidden, classifier = leaves((tokens, dim), (words, dim), scale=0.05)
    targets = torch.randint(0, words, (tokens,), device="cuda")
    return with_gradients(lambda: linear_cross_entropy(hidden, classifier, targets), hidden, classifier)


def block_sparse(m=2048, k=2048, n=1024, blocking=128):
    import stk

    mask = stk.random.dense_mask(m, k, 0.5, blocking)
    dense = (torch.randn(m, k) * 0.1 * mask).half()
    sparse = stk.ops.to_sparse(dense, blocking).to(torch.device("cuda")).requires_grad_(True)
    (right,) = leaves((k, n), dtype=torch.float16, scale=0.1)
    return with_gradients(lambda: stk.ops.dsd(sparse, right), right)


def suppress_boxes(count=4096):
    from conch.ops.vision.nms import nms

    corners = torch.rand(count, 2, device="cuda") * 100
    boxes = torch.cat([corners, corners + torch.rand(count, 2, device="cuda") * 20 + 1], dim=1)
    scores = torch.rand(count, device="cuda")
    return lambda: {"kept": nms(boxes, scores, 0.5)}


def quantized_scores(B=2, H=16, kv_heads=4, length=4096, D=128):
    from fused_turboquant.kernels.triton_attention import fused_qk_scores_rht

    q = torch.randn(B, H, 1, D, device="cuda")
    indices = torch.randint(0, 256, (B, kv_heads, length, D // 2), dtype=torch.uint8, device="cuda")
    norms, centroids = torch.rand(B, kv_heads, length, device="cuda"), torch.randn(16, device="cuda")
    return lambda: {"scores": fused_qk_scores_rht(q, indices, norms, centroids, D**-0.5, bits=4)}


PROGRAMS = {
    "fla_gla": Program("fla-core", gated_linear_attention, other={"D": 64}),
    "fla_retention": Program("fla-core", retention),
    "liger_dyt": Program("liger-kernel", dynamic_tanh, other={"columns": 5120}),
    "liger_mlp": Program("liger-kernel", swiglu_mlp),
    "gemlite": Program("gemlite", linear_4_bits, backward=False),
    "attn_gym_norm": Program("attn-gym", normalized_rows),
    "attn_gym_delta": Program("attn-gym", recurrent_delta_rule, backward=False),
    "torchao_int8": Program("torchao", scaled_int8_matmul, backward=False),
    "torchao_float8": Program("torchao", blockwise_float8, backward=False),
    "mlstm": Program("mlstm-kernels", mlstm),
    "rotary": Program("rotary-embedding-torch", attention_with_rotation),
    "cut_cross_entropy": Program("cut-cross-entropy", cross_entropy, environment={"CCE_AUTOTUNE": "1"}),
    "stk": Program("stanford-stk", block_sparse),
    "conch": Program("conch-triton-kernels", suppress_boxes, backward=False),
    "turboquant": Program("fused-turboquant", quantized_scores, backward=False),
}
