"""Mixtures of experts on a CUDA device beside the floor of each figure: grouped products alone, router, the whole op.

    python benchmarks/experts.py --out FOLDER                              # both shapes, in a minute
    python benchmarks/experts.py --shapes qwen3-30b-a3b --tokens 64,4096   # one of them, at two sizes

Weights, tokens and logits are random, and so each token's experts. The floor of a product is the larger of two times:
that of reading the weights of the experts that are chosen, and its rows, at the copy bandwidth, and that of its
operations at the rate of a large product; the same run measures both ceilings, as `cuda.py` does. Times are the
device's, of calls in one captured graph over inputs in turn, so that weights of a call are not those of the one before
where few are read. `--out` gets experts.json and experts.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda import facts_of, measure_ceilings
from figures import HEAD, Figure, Report
from floors import SHAPES, Ceilings

MIXTURES = ("qwen3-30b-a3b", "deepseek-v2-lite")
TOKENS = (1, 16, 64, 256, 4096)
CALLS, FEWER_CALLS, REPEATS = 8, 3, 9
"""Inputs of a graph, of many tokens and of few, and timed replays."""
ITEM = 2
"""Bytes of bfloat16."""


@dataclass(frozen=True)
class Mixture:
    """Sizes of a layer: hidden H, `experts` of width I, of which each token has `chosen`."""

    hidden: int
    experts: int
    chosen: int
    width: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Mixture:
        experts = config.get("num_experts") or config["n_routed_experts"]
        return cls(config["hidden_size"], experts, config["num_experts_per_tok"], config["moe_intermediate_size"])

    def up_s(self, ceilings: Ceilings, tokens: int, used: float) -> float:
        """Least seconds of gates and ups with the activation, of which `used` experts are read."""
        pairs, matrix = tokens * self.chosen, self.hidden * self.width
        num_bytes = ITEM * (2 * used * matrix + tokens * self.hidden + pairs * self.width)
        return least_s(ceilings, num_bytes, 4 * pairs * matrix)

    def down_s(self, ceilings: Ceilings, tokens: int, used: float) -> float:
        """As `up_s`, of the product behind them."""
        pairs, matrix = tokens * self.chosen, self.hidden * self.width
        num_bytes = ITEM * (used * matrix + pairs * (self.width + self.hidden))
        return least_s(ceilings, num_bytes, 2 * pairs * matrix)

    def op_s(self, ceilings: Ceilings, tokens: int, used: float) -> float:
        """Of the whole op, which needs to read and write no more than weights and tokens."""
        pairs, matrix = tokens * self.chosen, self.hidden * self.width
        return least_s(ceilings, ITEM * (3 * used * matrix + 2 * tokens * self.hidden), 6 * pairs * matrix)


def least_s(ceilings: Ceilings, num_bytes: float, flops: float) -> float:
    """Seconds by whichever ceiling binds."""
    return max(num_bytes / ceilings.copy_bytes_s, flops / ceilings.matmul_flop_s)


def graph_us(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Microseconds of a call, one value a replay of a graph of them all."""
    import torch

    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(REPEATS + 1):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    return times[1:]


class Layer:
    """The packed experts and router of one layer, with random weights."""

    def __init__(self, sizes: Mixture) -> None:
        import torch

        from framework.interfaces import ExpertWeights, Routing
        from framework_backends.cuda_experts import CudaExpertsPacker
        from framework_backends.cuda_linear import CudaLinearPacker

        def normal(*shape: int, scale: float, dtype: Any = torch.bfloat16) -> Any:
            return torch.randn(shape, device="cuda", dtype=dtype) * scale

        self.sizes = sizes
        hidden, width = sizes.hidden, sizes.width
        weights = ExpertWeights(
            normal(sizes.experts, 2 * width, hidden, scale=hidden**-0.5),
            normal(sizes.experts, hidden, width, scale=width**-0.5),
        )
        self.experts = CudaExpertsPacker(False).pack(weights, Routing(sizes.chosen))
        router = normal(sizes.experts, hidden, scale=hidden**-0.5, dtype=torch.float32)
        self.router: Any = CudaLinearPacker(False).pack(router, None)

    def figures(self, part: str, tokens: int, ceilings: Ceilings) -> Iterator[Figure]:
        """Of so many tokens: the op, and its products where they are grouped; the router without a floor."""
        import torch

        sizes, count = self.sizes, CALLS if tokens <= 256 else FEWER_CALLS
        xs = [torch.randn(tokens, sizes.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        logits = [torch.randn(tokens, sizes.experts, device="cuda") for _ in range(count)]
        used = sum(len(one.topk(sizes.chosen).indices.unique()) for one in logits) / count

        def told(what: str, calls: Sequence[Callable[[], Any]], floor_s: float | None) -> Figure:
            floor = None if floor_s is None else 1e6 * floor_s
            return Figure(part, f"{what}, {tokens} tokens", "us", graph_us(calls), floor)

        pairs = list(zip(xs, logits, strict=True))
        yield told("op", [lambda p=p: self.experts(*p) for p in pairs], sizes.op_s(ceilings, tokens, used))
        for what, calls in self._products(pairs).items():
            floor = sizes.up_s if what == "gate and up" else sizes.down_s
            yield told(what, calls, floor(ceilings, tokens, used))
        yield told("router", [lambda x=x: self.router.widened(x) for x in xs], None)

    def _products(self, pairs: Sequence[tuple[Any, Any]]) -> dict[str, list[Callable[[], Any]]]:
        """Calls of both grouped products, over tokens sorted beforehand; none where rows are multiplied one by one."""
        import torch

        experts, tokens = self.experts, len(pairs[0][0])
        if tokens <= experts._tiles.most_rows:
            return {}
        tiles, words = experts._tiles.of(tokens), experts._words(pairs[0][0])
        sorts = [experts._sorted(logits, None, tiles.up.pairs, words)[1] for _, logits in pairs]
        inner = torch.randn(tokens * self.sizes.chosen, self.sizes.width, device="cuda", dtype=torch.bfloat16)

        def up(x: Any, by_expert: Any) -> Any:
            return experts._product(x, by_expert, tiles.up, tokens, gated=True, words=words)

        def down(by_expert: Any) -> Any:
            return experts._product(inner, by_expert, tiles.down, tokens, gated=False, words=words)

        return {
            "gate and up": [lambda x=x, s=s: up(x, s) for (x, _), s in zip(pairs, sorts, strict=True)],
            "down": [lambda s=s: down(s) for s in sorts],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(MIXTURES), help="names of floors.py, by commas")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="tokens of a call, by commas")
    parser.add_argument("--out", type=Path, help="folder for experts.json and experts.md")
    args = parser.parse_args()
    shapes = args.shapes.split(",")
    if unknown := set(shapes) - set(MIXTURES):
        parser.error(f"--shapes {min(unknown)}: no mixture of that name; there are {', '.join(MIXTURES)}")
    import torch

    if not torch.cuda.is_available():
        print("benchmarks/experts.py: torch sees no CUDA device here, and nothing was measured", file=sys.stderr)
        raise SystemExit(2)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    ceilings, report = measure_ceilings("bfloat16"), Report("experts", args.out)
    report.facts |= facts_of(args.shapes)
    report.facts["copy"] = f"{ceilings.copy_bytes_s / 1e12:.2f} TB/s"
    report.facts["product"] = f"{ceilings.matmul_flop_s / 1e12:.0f} TFLOP/s"
    print(HEAD, flush=True)
    for shape in shapes:
        layer = Layer(Mixture.of(SHAPES[shape]))
        for tokens in map(int, args.tokens.split(",")):
            report.add(layer.figures(shape, tokens, ceilings))
    print("\n".join(f"- {key}: {value}" for key, value in report.facts.items()))


if __name__ == "__main__":
    main()
