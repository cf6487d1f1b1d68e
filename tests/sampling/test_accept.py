"""Rejection acceptance leaves the target's distribution as it is, by enumeration of all paths."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np
import pytest
from cases.distributions import Language, Prefix, without
from cases.programs import StoredJit
from suite.marks import full_if

from duetto.sampling.accept import DraftTokens, accept_or_resample, sequential_acceptance_probs, target_probs
from duetto.sampling.sample import sample
from duetto.sampling.token_tree import TokenTree

# probability of this draw, the guesses, the distribution of each [C,V]
Offer = tuple[float, Prefix, np.ndarray]


def independent(q: np.ndarray, count: int) -> Iterator[Offer]:
    for tokens in itertools.product(range(len(q)), repeat=count):
        yield float(np.prod(q[list(tokens)].astype(np.float64))), tokens, np.stack([q] * count)


def distinct(q: np.ndarray, count: int) -> Iterator[Offer]:
    def draw(q: np.ndarray, count: int) -> Iterator[Offer]:
        if count == 0:
            yield 1.0, (), np.zeros((0, len(q)), np.float32)
            return
        for token in np.flatnonzero(q):
            for weight, tokens, probs in draw(left(q, int(token)), count - 1):
                yield float(q[token]) * weight, (int(token), *tokens), np.concatenate([q[None], probs])

    return draw(q, count)


@cache
def left_jit() -> Callable:
    return jax.jit(without)


def left(q: np.ndarray, token: int) -> np.ndarray:
    return np.asarray(left_jit()(q[None], np.array([token], np.int32)))[0]


def likeliest(q: np.ndarray, count: int) -> Iterator[Offer]:
    tokens = tuple(np.argsort(-q, kind="stable")[:count].tolist())
    yield 1.0, tokens, np.eye(len(q), dtype=np.float32)[list(tokens)]


def unlikeliest(q: np.ndarray, count: int) -> Iterator[Offer]:
    return likeliest(-q, count)


DRAFTERS = {f.__name__: f for f in (independent, distinct, likeliest, unlikeliest)}
trials_jit, decide_jit, sample_jit, target_jit = map(
    StoredJit, (sequential_acceptance_probs, accept_or_resample, sample, target_probs)
)


@dataclass(frozen=True)
class Enumeration:
    """Every path that verification of a tree of guesses can take, each with its probability."""

    language: Language
    drafter: Callable[[np.ndarray, int], Iterator[Offer]]
    tree: TokenTree

    def joint(self, node: int, prefix: Prefix, length: int) -> np.ndarray:
        """Probabilities of the first `length` tokens, by the rule that the sampler applies at this node and
        below."""
        children = [c for c in self.tree.children[node] if c >= 0]
        if not children or length == 0:
            return self.language.joint(prefix, length)
        offers = list(self.drafter(self.language.q(prefix), len(children)))
        keep, rest = self.judged(prefix, offers)
        after = [self.language.joint((*prefix, x), length - 1) for x in range(self.language.V)]
        total = np.zeros((self.language.V,) * length)
        deeper = {
            (c, x): self.joint(int(c), (*prefix, x), length - 1)
            for c in children
            for x in range(self.language.V)
        }
        for (weight, tokens, _), kept, remaining in zip(offers, keep, rest, strict=True):
            for child, token, probability in zip(children, tokens, kept, strict=True):
                total[token] += weight * probability * deeper[child, token]
                weight *= 1 - probability
            total += weight * np.stack([r * a for r, a in zip(remaining, after, strict=True)])
        return total

    def judged(self, prefix: Prefix, offers: list[Offer]) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.array([tokens for _, tokens, _ in offers], np.int32)
        probs = np.stack([probs for *_, probs in offers])
        p = np.broadcast_to(self.language.p(prefix), (len(offers), self.language.V))
        keep, rest = trials_jit(p, DraftTokens(tokens, np.ones(tokens.shape, bool), probs))
        return np.asarray(keep, np.float64), np.asarray(rest, np.float64)


TREES = {
    "chain of 1": TokenTree.from_widths((1,)),
    "chain of 2": TokenTree.from_widths((1, 1)),
    "chain of 3": TokenTree.from_widths((1, 1, 1)),
    "two beside each other": TokenTree.from_widths((2,)),
    "three beside each other": TokenTree.from_widths((3,)),
    "two, each with one": TokenTree.from_widths((2, 1)),
    "two, the first with two, the second with one": TokenTree((-1, 0, 0, 1, 1, 2)),
    "uneven, three deep": TokenTree((-1, 0, 0, 1, 3)),
}


@full_if(
    lambda tree, drafter: tree is TREES["three beside each other"] and drafter is not DRAFTERS["independent"]
)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_all_paths_add_up_to_the_target(tree: TokenTree, drafter):
    for V, noise in ((4, 0.5), (5, 3.0), (6, 0.0)):
        language = Language(V, seed=V, noise=noise)
        found = Enumeration(language, drafter, tree).joint(0, (), tree.depth + 1)
        np.testing.assert_allclose(found, language.joint((), tree.depth + 1), rtol=0, atol=1e-6)


def test_a_wrong_rule_would_be_noticed():
    """The enumeration is no tautology: keeping a little too often shifts the distribution by far more than
    the bound."""
    language, tree = Language(5, seed=5, noise=3.0), TREES["chain of 2"]

    class Lenient(Enumeration):
        def judged(self, prefix, offers):
            keep, rest = super().judged(prefix, offers)
            return np.minimum(1, keep * 1.05), rest

    found = Lenient(language, independent, tree).joint(0, (), 3)
    assert np.abs(found - language.joint((), 3)).max() > 1e-3
