"""The contract suite on a latent attention in plain torch: sound ones pass, and what is planted is caught."""

from dataclasses import replace

import pytest
import torch

from framework.interfaces import AttentionCaps, BackendContext, KVSpec, LatentUp
from framework.testing import attention_suite
from framework.testing.attention_suite import CHECKS, AttentionPlugin
from framework.testing.checking import Skipped, name_of, run_check
from framework_backends.cpu import CpuBackend


class Absorbed:
    """Every query, a decode's or a prompt's, attends over latents."""

    caps = AttentionCaps(block_sizes=(16,), any_block_size=True, latent=True)

    def __init__(self, options, ctx):
        self.block_size, self._dtype = ctx.block_size, ctx.dtype

    def kv_spec(self, layer):
        assert (layer.kind, layer.num_kv_heads) == ("latent", 1)
        width = layer.head_dim
        return KVSpec((-1, self.block_size, width), self._dtype, self.block_size * width * self._dtype.itemsize)

    def bind(self, layers, kv):
        (self.spec,), (self.kv,) = layers, kv

    def add_request(self, req_idx):
        pass

    def release(self, req_idx):
        pass

    def plan(self, batch, group):
        return Plan(self, batch, group)


class Plan:
    def __init__(self, owner, batch, group):
        self.owner, self.batch, self.group = owner, batch, group

    def forward_latent(self, layer, q, latent, up):
        owner, batch, rank = self.owner, self.batch, self.owner.spec.value_dim
        owner.kv.view(-1, latent.shape[1])[batch.slot_mapping[self.group]] = latent
        out = torch.zeros(*q.shape[:2], up.values.shape[1], dtype=q.dtype)
        start = 0
        spans = zip(batch.rows_np, batch.num_scheduled_tokens_np, batch.seq_lens.tolist(), strict=True)
        for row, count, length in spans:
            blocks = batch.block_table[self.group][row, : -(-length // owner.block_size)].long()
            kept = owner.kv[blocks].flatten(0, 1)[:length].float()
            tokens = slice(start, start + count)
            out[tokens] = self.attend(q[tokens].float(), kept, up, rank).to(q.dtype)
            start += count
        return out

    def attend(self, q, kept, up, rank):
        nope, rope = q.split((up.keys.shape[1], kept.shape[1] - rank), dim=2)
        absorbed = torch.cat((torch.einsum("thd,hdr->thr", nope, up.keys.float()), rope), dim=2)
        scores = torch.einsum("thr,lr->htl", absorbed, kept) * self.owner.spec.scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(kept) - len(q) + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("htl,lr,hdr->thd", weights, kept[:, :rank], up.values.float())


def planted(change):
    """A plugin whose plans get other products."""

    class Changed(Absorbed):
        def plan(self, batch, group):
            plan = super().plan(batch, group)

            class Other:
                def forward_latent(self, layer, q, latent, up):
                    return plan.forward_latent(layer, *change(q, latent, up))

            return Other()

    return Changed


class ReadsBeyondItsLength(Absorbed):
    def plan(self, batch, group):
        return super().plan(replace(batch, seq_lens=batch.seq_lens + (batch.seq_lens % 16 != 0).int()), group)


def host(dtype):
    return CpuBackend({}, BackendContext(str(dtype).removeprefix("torch.")))


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_latent_attention_in_plain_torch_keeps_the_contract(check):
    skipped = ("check_blocks_behind_the_window_are_not_read", "check_recorded_steps_serve_other_requests",
               "check_projections_give_what_turned_heads_give", "check_requests_alone_give_the_same_bits")  # fmt: skip
    if check.__name__ in skipped:
        with pytest.raises(Skipped):
            check(AttentionPlugin(Absorbed, host))
    else:
        check(AttentionPlugin(Absorbed, host))


@pytest.mark.parametrize(
    "target",
    [
        planted(lambda q, latent, up: (q, latent, LatentUp(up.keys, up.values.flip(0)))),
        planted(lambda q, latent, up: (q.flip(2), latent, up)),
        planted(lambda q, latent, up: (q, latent.roll(1, 0), up)),
        ReadsBeyondItsLength,
    ],
    ids=("values_of_other_heads", "rotated_part_first", "latents_of_other_tokens", "beyond_its_length"),
)
@pytest.mark.parametrize(
    "check", (attention_suite.check_output_equals_the_reference,
              attention_suite.check_chunks_of_any_size_give_the_whole_prompt), ids=name_of,
)  # fmt: skip
def test_what_is_planted_is_caught(target, check):
    outcome = run_check(check, AttentionPlugin(target, host))
    assert outcome.result == "failed" and "off by" in outcome.reason


def test_heads_of_deepseek_stand_for_all_where_no_other_size_is_served():
    class Fixed(Absorbed):
        caps = replace(Absorbed.caps, head_dims=(576,))

    shapes = AttentionPlugin(Fixed, host).shapes()
    assert len(shapes) > 5 and {case.kept for case in shapes} == {(1, 576)}
