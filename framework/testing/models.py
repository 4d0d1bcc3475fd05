"""The contract suite of model families: how one is built, which weights it takes, and that nothing but attention
reaches from token to token.

Each function of `CHECKS` takes a `ModelCase`; requests in real engines are in `model_engine`. Called by `run=check` and
by tests. Whether a family computes what it should is no affair of a contract: its own tests compare it with another
implementation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from framework.errors import CheckpointError, FrameworkError, NotBuiltError
from framework.testing.checking import Skipped, assert_all
from framework.testing.model_bench import MAX_LEN, Built, ModelCase, RandomWeights, assert_near, outline_of, tokens

NOBODYS = "model.nobody.takes.this.weight"
NO_SUCH = "no_such_thing"


def check_it_has_what_a_model_has(case: ModelCase) -> None:
    """vocab_size, ignored_weights, embed, forward, compute_logits, and logits of the vocabulary."""
    built = Built(case)
    for word in ("vocab_size", "ignored_weights", "embed", "forward", "compute_logits"):
        assert hasattr(built.model, word), f"{case.name}: has no {word}; see framework.interfaces.Model"
    assert built.model.vocab_size == built.vocab_size, (
        f"{case.name}: vocab_size is {built.model.vocab_size}, and the config says {built.vocab_size}"
    )
    logits = built.logits(*tokens(3, built.vocab_size))
    assert tuple(logits.shape) == (3, built.vocab_size), f"{case.name}: logits of shape {list(logits.shape)}"
    assert bool(logits.isfinite().all()), f"{case.name}: logits that are not finite"


def check_layers_are_known_without_weights(case: ModelCase) -> None:
    """A constructor looks at shapes alone: an engine asks for the layers before any weight is read."""
    layers = outline_of(case)
    assert layers == Built(case).ctx.layers, f"{case.name}: declares other layers with its weights than without"


def check_layers_are_used_in_their_order(case: ModelCase) -> None:
    """Each once in a forward pass, with heads of the shapes that were declared."""
    built = Built(case)
    built.run(*tokens(3, built.vocab_size))
    wanted = list(range(built.num_layers))
    assert built.plan.called == wanted, f"{case.name}: attends in layers {built.plan.called}, declared were {wanted}"


def check_nothing_but_attention_mixes_tokens(case: ModelCase) -> None:
    """A token's row follows from its id and its position: neighbours, their number and the order do not matter."""
    built = Built(case)
    ids, positions = tokens(6, built.vocab_size)
    whole = built.run(ids, positions).hidden
    order = torch.tensor([4, 0, 5, 1])
    some = built.run(ids[order], positions[order]).hidden
    assert_near(some, whole[order], f"{case.name}: rows of a step with other tokens, in another order")
    one = built.run(ids[2:3], positions[2:3]).hidden
    assert_near(one, whole[2:3], f"{case.name}: row of a token alone")


def check_wanted_rows_are_those_of_a_whole_step(case: ModelCase) -> None:
    """What `ForwardContext.wanted` leaves out changes nothing of the rest."""
    built = Built(case)
    ids, positions = tokens(6, built.vocab_size)
    wanted = torch.tensor([1, 4])
    whole, some = built.run(ids, positions).hidden, built.run(ids, positions, wanted=wanted).hidden
    some = some[wanted] if len(some) == len(ids) else some
    assert_near(some, whole[wanted], f"{case.name}: rows that are wanted")


def check_features_come_as_asked(case: ModelCase) -> None:
    """Hidden states that enter layers, in the order asked for, and the rows are the same with and without."""
    built = Built(case)
    ids, positions = tokens(5, built.vocab_size)
    asked = (built.num_layers, 0)
    try:
        output = built.run(ids, positions, feature_layers=asked)
    except NotBuiltError as error:
        raise Skipped(f"refused by name: {error}") from error
    assert len(output.features) == 2, f"{case.name}: {len(output.features)} features for the layers {asked}"
    last, first = output.features
    assert_near(output.hidden, built.run(ids, positions).hidden, f"{case.name}: rows beside features")
    assert last.shape == first.shape and len(last) == len(ids), f"{case.name}: features of {list(last.shape)}"
    moved = built.run(ids, positions.flip(0), feature_layers=(0,)).features[0]
    assert not torch.equal(first, last), f"{case.name}: what enters the first layer is what leaves the last"
    assert moved.shape == first.shape, f"{case.name}: features of {list(moved.shape)}"


def check_a_step_can_be_exported(case: ModelCase) -> None:
    """No value is read on the host and no branch depends on one: `torch.export` of a step, for any number of tokens."""
    if not case.keeps("graph_safe"):
        raise Skipped("the family says that its steps cannot be recorded")
    built = Built(case)
    step = _Step(built)
    count = torch.export.Dim("count", min=2, max=MAX_LEN)
    program = torch.export.export(step, tokens(5, built.vocab_size), dynamic_shapes=({0: count}, {0: count}))
    given = tokens(8, built.vocab_size)
    assert_near(program.module()(*given), step(*given), f"{case.name}: an exported step of another length")
    waits = ("_local_scalar_dense", "nonzero", "masked_select", "aten.item")
    found = [str(node.target) for node in program.graph.nodes if any(word in str(node.target) for word in waits)]
    assert not found, f"{case.name}: a step reads values on the host: {', '.join(found)}"


class _Step(torch.nn.Module):
    def __init__(self, built: Built) -> None:
        super().__init__()
        self._built = built
        built.plan.called = _Unheard()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self._built.logits(ids, positions)


class _Unheard(list[int]):
    """Keeps nothing: an exported step must not change what is outside of it."""

    def append(self, _: int) -> None:
        return None


def check_every_weight_is_taken_once(case: ModelCase) -> None:
    """Each by its name: one that is missing is named, and one that nobody takes stays unused."""
    first = Built(case).weights
    known = frozenset(first.taken)
    again = Built(case, RandomWeights(case.config, known | {NOBODYS})).weights
    assert again.taken == first.taken, f"{case.name}: takes other weights where there are no others"
    assert again.unused() == [NOBODYS], f"{case.name}: {again.unused()} unused, wanted was {[NOBODYS]}"
    for name in (min(known), max(known)):
        _assert_missing(case, known - {name}, name)


def _assert_missing(case: ModelCase, known: frozenset[str], name: str) -> None:
    try:
        Built(case, RandomWeights(case.config, known))
    except CheckpointError as error:
        bare = name.partition(".")[2]  # of a family that looks for a prefix, and finds none where this one is missing
        is_named = name in str(error) or (bool(bare) and bare in str(error))
        assert is_named, f"{case.name}: {name} is missing, and the error does not name it: {error}"
    else:
        raise AssertionError(f"{case.name}: builds without {name}")


def check_head_may_be_the_embedding(case: ModelCase) -> None:
    """A tied model takes one matrix of [vocabulary, hidden], another one two."""
    counts = []
    for tied in (True, False):
        built = Built(case.with_config(tie_word_embeddings=tied))
        hidden = built.run(*tokens(2, built.vocab_size)).hidden.shape[1]
        shapes = list(built.weights.taken.values())
        counts.append(shapes.count((built.vocab_size, hidden)))
    assert counts[0] + 1 == counts[1], (
        f"{case.name}: takes {counts[0]} matrices of the vocabulary when tie_word_embeddings is on, and {counts[1]} off"
    )


def check_what_it_does_not_know_is_refused(case: ModelCase) -> None:
    """Keys of config.json that change the output, with values that nobody has: an error that names the key."""
    for key, edits in _strange(case):
        try:
            Built(case.with_config(**edits))
        except FrameworkError as error:
            is_named = key in str(error) or NO_SUCH in str(error)
            assert is_named, f"{case.name}: {edits} is refused without naming {key}: {error}"
        except Exception as error:
            raise AssertionError(f"{case.name}: {edits} ends with {type(error).__name__}: {error}") from error
        else:
            raise AssertionError(f"{case.name}: {edits} is accepted and ignored")


def _strange(case: ModelCase) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "quantization_config", {"quantization_config": {"quant_method": NO_SUCH}}
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        if key in case.config:
            yield key, {key: NO_SUCH}
    if isinstance(rope := case.config.get("rope_parameters"), dict) and "rope_type" in rope:
        yield "rope_type", {"rope_parameters": {**rope, "rope_type": NO_SUCH}}
    if layers := case.config.get("num_hidden_layers"):
        yield "layer_types", {"layer_types": [NO_SUCH] * layers}


def check_padding_is_not_counted(case: ModelCase) -> None:
    """Experts count the tokens that they were given, and none of the padding behind `num_tokens`."""
    built = Built(case)
    if not built.ctx.experts:
        raise Skipped("the family has no experts")
    ids, positions = tokens(6, built.vocab_size)
    built.run(ids, positions, num_tokens=torch.tensor([4], dtype=torch.int32))
    for name, experts in built.ctx.experts.items():
        once = Built(case)
        once.run(ids[:4], positions[:4])
        wanted = once.ctx.experts[name].counts
        assert torch.equal(experts.counts, wanted), f"{case.name}: {name} counts padding: {experts.counts} not {wanted}"


CHECKS = (
    check_it_has_what_a_model_has,
    check_layers_are_known_without_weights,
    check_layers_are_used_in_their_order,
    check_nothing_but_attention_mixes_tokens,
    check_wanted_rows_are_those_of_a_whole_step,
    check_features_come_as_asked,
    check_a_step_can_be_exported,
    check_every_weight_is_taken_once,
    check_head_may_be_the_embedding,
    check_what_it_does_not_know_is_refused,
    check_padding_is_not_counted,
)


def check_model(case: ModelCase) -> None:
    """All checks in one call."""
    assert_all(CHECKS, case)
