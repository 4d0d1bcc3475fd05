"""A step of a tiny model goes through torch.export: no value is read on the host, no branch depends on one."""

import pytest
import torch

from framework.interfaces import ForwardContext
from framework_loaders.dummy import DummySource
from framework_models.qwen3 import Qwen3
from framework_models.qwen3_moe import Qwen3Moe

CONFIG = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0]}


class Step(torch.nn.Module):
    def __init__(self, built):
        super().__init__()
        self.model, self.ctx = built.model, ForwardContext(built.plans)

    def forward(self, ids, positions, rows):
        hidden = self.model.forward(self.model.embed(ids), positions, self.ctx).hidden
        return self.model.compute_logits(hidden.index_select(0, rows))


@pytest.mark.parametrize(("target", "config"), [(Qwen3, CONFIG), (Qwen3Moe, CONFIG | EXPERTS)], ids=["dense", "sparse"])
def test_a_step_exports_for_any_number_of_tokens(target, config, build_model):
    step = Step(build_model(target, config, DummySource(torch.float32, torch.device("cpu"), 3)))
    tokens = torch.export.Dim("tokens", min=2, max=64)
    example = (torch.arange(5), torch.arange(5), torch.tensor([4, 2]))
    program = torch.export.export(step, example, dynamic_shapes=({0: tokens}, {0: tokens}, None))
    other = (torch.tensor([7, 1, 30, 4, 4, 9, 2, 11]), torch.arange(8), torch.tensor([0, 7]))
    torch.testing.assert_close(program.module()(*other), step(*other))
    names = {str(node.target) for node in program.graph.nodes}
    waits = ("aten.item", "_local_scalar_dense", "nonzero", "masked_select")
    assert "aten.embedding.default" in names and not [name for name in names if any(word in name for word in waits)]
