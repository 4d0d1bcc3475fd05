"""Every built-in stage once more, plainly: one row of float64 logits, numpy, no blocks, no batch, no intervals.

What a stage keeps is written from its definition, not from its code. Where a bound lies so near to a token that float32
may decide otherwise, `NearTie` is raised: such a row proves nothing. No test is here.
"""

from dataclasses import dataclass

import numpy as np

from framework import rng

GROUP = 128
XTC_STREAM = rng.stage_stream("xtc")
NEAR = 5e-5
"""Relative distance of a logit and a bound, and distance of two masses, that float32 may turn round."""


class NearTie(Exception):
    """A bound too near to a token to say on which side it is."""


@dataclass
class Row:
    """What a stage knows of a row. output: the tokens before the one that is drawn."""

    params: object
    prompt: list
    output: list
    seed: int

    @property
    def text(self):
        return [*self.prompt, *self.output]

    def own(self, stage):
        return (self.params.extra_args or {}).get(stage)


def processed(logits, row, stages):
    """[V] float64: logits after the last of `stages`, -inf where not kept. A greedy row ends before temperature."""
    logits = np.asarray(logits, dtype=np.float64)
    switches = row.params.stages or {}
    for name in stages:
        if row.params.is_greedy and name not in BEFORE_GREEDY:
            continue
        if name in STAGES and switches.get(name, True) and np.isfinite(logits).any():
            logits = STAGES[name](logits, row)
    return logits


def log_softmax(logits):
    return logits - np.logaddexp.reduce(logits)


# ------------------------------------------------------------------------------------------------------------- masks


def _without(logits, ids):
    logits = logits.copy()
    logits[list(ids)] = -np.inf
    return logits


def allowed_ids(logits, row):
    ids = row.params.allowed_token_ids
    return logits if ids is None else _without(logits, set(range(len(logits))) - set(ids))


def min_tokens(logits, row):
    """Of a checkpoint without eos."""
    is_early = len(row.output) < row.params.min_tokens
    return _without(logits, row.params.stop_token_ids or ()) if is_early else logits


def bad_words(logits, row):
    words = row.params.bad_words_token_ids or ()
    return _without(logits, {w[-1] for w in words if len(w) == 1 or tuple(row.output[1 - len(w) :]) == tuple(w[:-1])})


def no_repeat_ngram(logits, row):
    if row.own("no_repeat_ngram") is None:
        return logits
    n, text = row.own("no_repeat_ngram")["size"], row.text
    last = text[len(text) - n + 1 :] if n > 1 else []
    return _without(logits, {text[i] for i in range(n - 1, len(text)) if text[i - n + 1 : i] == last})


# ------------------------------------------------------------------------------------------------------- elementwise


def logit_bias(logits, row):
    logits = logits.copy()
    for token, value in (row.params.logit_bias or {}).items():
        logits[token] += value
    return logits


def penalties(logits, row):
    p, logits = row.params, logits.copy()
    for token in set(row.text):
        r = p.repetition_penalty
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token in set(row.output):
        logits[token] -= p.frequency_penalty * row.output.count(token) + p.presence_penalty
    return logits


def dry(logits, row):
    given = {
        "multiplier": 0,
        "base": 1.75,
        "allowed_length": 2,
        "range": 0,
        "sequence_breakers": [],
        **(row.own("dry") or {}),
    }
    text, breakers, logits = row.text, set(given["sequence_breakers"]), logits.copy()
    text = text[-given["range"] :] if given["range"] else text
    longest = {}
    for place in range(1, len(text)):
        length = 0
        while length < min(place, 50) and text[place - 1 - length] == text[-1 - length] not in breakers:
            length += 1
        longest[text[place]] = max(longest.get(text[place], 0), length)
    for token, length in longest.items():
        if length >= given["allowed_length"] and token not in breakers:
            logits[token] -= given["multiplier"] * given["base"] ** (length - given["allowed_length"])
    return logits


def temperature(logits, row):
    return logits / row.params.temperature


def dynamic_temperature(logits, row):
    if (given := row.own("dynamic_temperature")) is None:
        return logits
    low, high, exponent = given.get("low", 1.0), given.get("high", 1.0), given.get("exponent", 1.0)
    count = np.isfinite(logits).sum()
    share = _entropy(logits) / np.log(count) if count > 1 else None
    return logits if share is None else logits / max(low + (high - low) * share**exponent, 1e-5)


# -------------------------------------------------------------------------------------------------------- thresholds


def _entropy(logits):
    logp = log_softmax(logits)
    return -np.sum(np.exp(logp) * np.where(np.isfinite(logp), logp, 0.0))


def _refuse_near(logits, bound):
    """A bound that is computed may come to lie on a token as well: two of the same probability have 0.5 each."""
    if bound > -np.inf and (np.abs(logits - bound) < NEAR * max(1.0, abs(bound))).any():
        raise NearTie


def _at_least(logits, bound):
    """Logits with -inf below a computed bound; the best token stays."""
    is_best = logits == logits.max()
    _refuse_near(logits[~is_best], bound)
    return np.where((logits >= bound) | is_best, logits, -np.inf)


def _nearest_up_to(logits, distance, mass):
    """Bool: of the tokens in rising order of their distance, equals together, as many as it takes to reach the mass."""
    p = np.exp(log_softmax(logits))
    nearer = np.array([p[distance < d].sum() for d in distance])
    if (np.abs(nearer - mass) < NEAR).any():
        raise NearTie
    kept = (nearer < mass) & np.isfinite(logits)
    last = distance[kept].max()
    is_near = (distance != last) & (
        np.abs(distance - last) < NEAR * max(1.0, np.abs(logits[np.isfinite(logits)]).max())
    )
    if is_near.any():
        raise NearTie
    return kept


def min_p(logits, row):
    return _at_least(logits, logits.max() + np.log(row.params.min_p)) if row.params.min_p else logits


def top_k(logits, row):
    k = row.params.top_k
    if not 0 < k < len(logits):
        return logits
    kth = np.sort(logits)[-k]
    _refuse_near(logits[logits != kth], kth)
    return np.where(logits >= kth, logits, -np.inf)


def top_p(logits, row):
    if row.params.top_p == 1:
        return logits
    return np.where(_nearest_up_to(logits, logits.max() - logits, row.params.top_p), logits, -np.inf)


def typical(logits, row):
    mass = (row.own("typical") or {}).get("mass", 1)
    if mass == 1:
        return logits
    surprise = -log_softmax(logits)
    distance = np.where(np.isfinite(logits), np.abs(surprise - _entropy(logits)), np.inf)
    return np.where(_nearest_up_to(logits, distance, mass), logits, -np.inf)


def top_n_sigma(logits, row):
    if row.own("top_n_sigma") is None:
        return logits
    return _at_least(logits, logits.max() - row.own("top_n_sigma")["n"] * logits[np.isfinite(logits)].std())


def _likelier_than(logits, log_p):
    return _at_least(logits, np.logaddexp.reduce(logits) + log_p)


def epsilon(logits, row):
    value = (row.own("epsilon") or {}).get("epsilon", 0)
    return _likelier_than(logits, np.log(value)) if value else logits


def eta(logits, row):
    value = (row.own("eta") or {}).get("epsilon", 0)
    return _likelier_than(logits, min(np.log(value), np.log(value) / 2 - _entropy(logits))) if value else logits


def xtc(logits, row):
    """Of a checkpoint without eos and tokenizer, so that no token is protected."""
    if row.own("xtc") is None:
        return logits
    threshold, probability = row.own("xtc").get("threshold", 0.1), row.own("xtc").get("probability", 0.5)
    bits = rng.random_bits(rng.row_key(row.seed, len(row.text), XTC_STREAM, 0), 0)
    bound = np.logaddexp.reduce(logits) + np.log(threshold) if threshold else -np.inf
    _refuse_near(logits, bound)
    above = logits[np.isfinite(logits) & (logits >= bound)]
    if (bits + 0.5) * 2.0**-32 >= probability or not len(above):
        return logits
    cut = above.min()
    _refuse_near(logits[logits != cut], cut)
    return np.where(logits <= cut, logits, -np.inf)


STAGES = {
    stage.__name__: stage
    for stage in (
        allowed_ids, min_tokens, bad_words, no_repeat_ngram, logit_bias, penalties, dry, temperature,
        dynamic_temperature, min_p, top_k, top_p, typical, top_n_sigma, epsilon, eta, xtc,
    )
}  # fmt: skip
BEFORE_GREEDY = ("allowed_ids", "min_tokens", "bad_words", "no_repeat_ngram", "logit_bias", "penalties", "dry")


# -------------------------------------------------------------------------------------------------------------- draw


def draw(logits, seed, position, stream=rng.TARGET):
    """The two-level draw: (id, gap between the best two scores of the level that was closer)."""
    groups = [logits[i : i + GROUP] for i in range(0, len(logits), GROUP)]
    sums = np.array([np.logaddexp.reduce(g) for g in groups])
    keys = [rng.row_key(seed, position, stream, level) for level in (0, 1)]
    first = sums + rng.gumbel_np(np.array([rng.random_bits(keys[0], i) for i in range(len(sums))]))
    group = int(first.argmax())
    ids = range(group * GROUP, group * GROUP + len(groups[group]))
    second = groups[group] + rng.gumbel_np(np.array([rng.random_bits(keys[1], i) for i in ids]))
    gaps = [np.diff(np.sort(s)[-2:])[0] if len(s) > 1 else np.inf for s in (first, second)]
    return group * GROUP + int(second.argmax()), min(gaps)
