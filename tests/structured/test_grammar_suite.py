"""The contract suite of grammars passes a small one, and catches each fault that is planted in it."""

import pytest

from framework.interfaces import GrammarSpec
from framework.testing.checking import run_checks
from framework.testing.grammars import CHECKS, GrammarCase, check_grammar

from .words import FAULTS, Words

CHOICES = GrammarSpec("choice", '["yes", "no", "yes or no", "aab"]')
NOTHING = GrammarSpec("choice", "[]")


def case_of(fault):
    return GrammarCase(type("Planted", (Words,), {"fault": fault}), specs=(CHOICES,), refused=(NOTHING,))


def test_small_grammar_passes():
    check_grammar(case_of(None))
    assert [o.check for o in run_checks(CHECKS, case_of(None)) if o.result != "passed"] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault):
    failed = [o for o in run_checks(CHECKS, case_of(fault)) if o.result == "failed"]
    assert failed and all(o.reason for o in failed)


def test_grammar_that_refuses_every_constraint_of_its_case_is_no_case():
    with pytest.raises(AssertionError, match="refuses every constraint of the case: serves 'choice' only"):
        check_grammar(GrammarCase(Words, specs=(GrammarSpec("regex", "a"),)))
