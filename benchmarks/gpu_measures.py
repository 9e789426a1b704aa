"""The time of kernels beside torch's on the same work, and of whole steps of a model."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu_work import BF16, Ceilings, Line, Tree, seconds_of
from coppice.models.config import DecoderConfig
from coppice.models.decoder import Decoder, DecoderWeights
from coppice.models.rope import rotary_table
from kernels import ops
from kernels.batch import AttentionBatch
from kernels.layer import LayerWeights
from kernels.triton.backend import TritonBackend


def measure_linear(
    backend: TritonBackend, config: DecoderConfig, device: torch.device, top: Ceilings
) -> Iterator[Line]:
    hidden, inner = config.hidden_size, config.intermediate_size
    for outputs, inputs in ((hidden, hidden), (2 * inner, hidden), (hidden, inner)):
        weight = torch.randn((outputs, inputs), device=device).to(BF16)
        for rows in (1, 16, 64, 512):
            x = torch.randn((rows, inputs), device=device).to(BF16)
            ours = seconds_of(lambda x=x, w=weight: backend.linear(x, w), device)
            torchs = seconds_of(lambda x=x, w=weight: functional.linear(x, w), device)
            size = 2 * (outputs * inputs + rows * (inputs + outputs))
            what = f"linear {outputs} x {inputs}, {rows} rows"
            other = f"cuBLAS {torchs * 1e6:,.1f}"
            yield top.line(what, ours, size, 2 * rows * outputs * inputs, other)


def measure_attention(
    backend: TritonBackend,
    config: DecoderConfig,
    device: torch.device,
    top: Ceilings,
    flex: bool,
    cases: tuple[tuple[int, int, bool], ...],
) -> Iterator[Line]:
    """`cases`: context, rows, whether they are a prefill."""
    for context, rows, causal in cases:
        case = Tree(config, context, rows, causal, device)
        batch = case.batch  # one object, so that the plan is made once, as for the layers of a pass
        seconds = seconds_of(
            lambda c=case, b=batch: backend.tree_attention(c.q, c.k, c.v, b), device
        )
        other = f"SDPA {seconds_of(sdpa(case), device) * 1e6:,.1f}"
        if flex:
            other += f", flex {seconds_of(flexible(case), device) * 1e6:,.1f}"
        size = case.k.nbytes + case.v.nbytes + 2 * case.q.nbytes
        flop = 4 * int(case.visible.sum()) * config.heads * config.head_dim
        kind = "prefill" if causal else "tree" if rows > 1 else "plain step"
        what = f"attention, {kind}, {rows} rows, context {context}"
        yield top.line(what, seconds, size, flop, other)


def in_order(case: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, heads, length, d] for torch, K and V already gathered: its best case."""
    k, v = (pool[case.slots].transpose(0, 1)[None].contiguous() for pool in (case.k, case.v))
    return case.q.transpose(0, 1)[None].contiguous(), k, v


def sdpa(case: Tree) -> Callable[[], Tensor]:
    q, k, v = in_order(case)
    causal = case.masks is None and case.context == 0
    mask = None if case.rows == 1 or causal else case.visible
    return lambda: functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, enable_gqa=True
    )


def flexible(case: Tree) -> Callable[[], Tensor]:
    q, k, v = in_order(case)
    seen = case.visible
    torch.compiler.reset()
    mask = create_block_mask(
        lambda b, h, row, key: seen[row, key], None, None, *seen.shape, device=q.device
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def random_model(config: DecoderConfig, device: torch.device) -> Decoder:
    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=device).normal_(std=shape[-1] ** -0.5)

    def layer() -> LayerWeights:
        hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
        norm = torch.ones(hidden, dtype=BF16, device=device)
        qkv = random((config.heads + 2 * config.kv_heads) * d, hidden)
        o, gate_up = random(hidden, config.heads * d), random(2 * inner, hidden)
        down = random(hidden, inner)
        return LayerWeights(norm, qkv, None, None, None, o, None, norm, gate_up, None, down, None)

    embedding, lm_head = (random(config.vocab_size, config.hidden_size) for _ in range(2))
    layers = tuple(layer() for _ in range(config.layers))
    norm = torch.ones(config.hidden_size, dtype=BF16, device=device)
    weights = DecoderWeights(embedding, layers, norm, lm_head)
    return Decoder(config, weights, rotary_table(config, device))


def measure_steps(
    backend: TritonBackend,
    config: DecoderConfig,
    device: torch.device,
    top: Ceilings,
    contexts: tuple[int, ...],
    rows: tuple[int, ...],
) -> Iterator[Line]:
    """Whole steps with logits of all rows: a tree of `rows` (the root and its nodes), one sequence.
    Times are those of a CUDA graph, beside the call from Python; the floor is weights and K/V."""
    model = random_model(config, device)
    fast = TritonBackend(backend.capability, exact=False)
    for context in contexts:
        for count in rows:
            step = new_step(model, config, context, count, device)
            with ops.use_backend(backend):
                eager = seconds_of(step, device)
                exact = seconds_of(captured(step, device), device)
            with ops.use_backend(fast):
                cublas = seconds_of(captured(step, device), device)
            with ops.use_backend(None):
                torchs = seconds_of(captured(step, device), device)
            other = (
                f"call {eager * 1e6:,.0f}, cuBLAS {cublas * 1e6:,.0f}, torch {torchs * 1e6:,.0f}"
            )
            size, flop = cost_of_step(config, context, count)
            kind = "tree" if count > 1 else "plain"
            yield top.line(
                f"step, {kind}, {count} rows, context {context}", exact, size, flop, other
            )


def new_step(
    model: Decoder, config: DecoderConfig, context: int, rows: int, device: torch.device
) -> Callable[[], Tensor]:
    one = Tree(config, context, rows, False, device)
    depths = torch.tensor([len(way) - 1 for way in one.ways], device=device)
    own = one.slots[context:]
    batch = AttentionBatch(own, context + depths, one.batch.segments)
    cache = model.new_cache(context + rows)
    tokens = torch.randint(0, config.vocab_size, (rows,), device=device)
    return lambda: model.logits(model.forward(tokens, cache, batch))


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same work without Python in between, as a CUDA graph; on another device the call."""
    if device.type != "cuda":
        return run
    run()  # compiles, and makes the batch's plan
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def cost_of_step(config: DecoderConfig, context: int, rows: int) -> tuple[float, float]:
    """Bytes of weights and K/V that are read once, and floating-point operations."""
    hidden, q_size = config.hidden_size, config.heads * config.head_dim
    kv_size = config.kv_heads * config.head_dim
    layer = hidden * (2 * q_size + 2 * kv_size + 3 * config.intermediate_size)
    weights = config.layers * layer + config.vocab_size * hidden
    kv = config.layers * 2 * kv_size * (context + rows)
    attention = config.layers * 4 * rows * context * q_size
    return 2.0 * (weights + kv), 2.0 * weights * rows + attention
