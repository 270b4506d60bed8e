"""Policy: values are checked where they are given, in code and in the environment."""

import pytest

from jax_vmem_guard.policy import Policy, policy_from_environment


def test_the_default_policy_repairs():
    assert Policy().mode == "fix"
    assert Policy().remedies[0] == "limit"


@pytest.mark.parametrize(("field", "value", "allowed"), [
    ("mode", "repair", "fix, report, off"),
    ("ahead", "always", "certain, expected, never"),
    ("remedies", ("limit", "magic"), "limit, buffering"),
    ("max_compiles", 0, "at least 1"),
    ("speculate", "yes", "True or False"),
    ("agreement_timeout_s", -1, "more than 0"),
])
def test_a_bad_value_is_named_with_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=field) as error:
        Policy(**{field: value})
    assert allowed in str(error.value)


def test_a_string_of_remedies_is_refused_instead_of_being_read_letter_by_letter():
    with pytest.raises(ValueError, match="tuple of names"):
        Policy(remedies="limit")


@pytest.mark.parametrize(("word", "mode"), [
    ("fix", "fix"), ("1", "fix"), ("on", "fix"), ("ON", "fix"), ("report", "report"), ("off", "off"), ("0", "off"),
    ("", "off"),
])
def test_the_mode_words_of_the_environment(word, mode):
    assert policy_from_environment({"JAX_VMEM_GUARD": word}).mode == mode


def test_unset_means_off():
    assert policy_from_environment({}).mode == "off"


def test_every_field_can_be_set_by_environment():
    policy = policy_from_environment({
        "JAX_VMEM_GUARD": "fix", "JAX_VMEM_GUARD_REMEDIES": "limit, buffering", "JAX_VMEM_GUARD_AHEAD": "never",
        "JAX_VMEM_GUARD_SPECULATE": "1", "JAX_VMEM_GUARD_MAX_COMPILES": "3", "JAX_VMEM_GUARD_PLAN_FILE": "plan.json",
        "JAX_VMEM_GUARD_BUG_REPORT_DIR": "bugs", "JAX_VMEM_GUARD_AGREEMENT_TIMEOUT_S": "12.5"})
    assert policy == Policy(remedies=("limit", "buffering"), ahead="never", speculate=True, max_compiles=3,
                            plan_file="plan.json", bug_report_dir="bugs", agreement_timeout_s=12.5)


@pytest.mark.parametrize(("variable", "value", "said"), [
    ("JAX_VMEM_GUARD", "fixx", "use one of fix"),
    ("JAX_VMEM_GUARD_PLANFILE", "x", "JAX_VMEM_GUARD_PLAN_FILE"),
    ("JAX_VMEM_GUARD_MAX_COMPILES", "many", "a whole number"),
    ("JAX_VMEM_GUARD_SPECULATE", "perhaps", "1 or 0"),
    ("JAX_VMEM_GUARD_REMEDIES", "limit,magic", "allowed: limit"),
])
def test_an_unknown_value_in_the_environment_is_an_error_that_lists_the_valid_ones(variable, value, said):
    with pytest.raises(ValueError, match="JAX_VMEM_GUARD") as error:
        policy_from_environment({"JAX_VMEM_GUARD": "fix", variable: value})
    assert said in str(error.value)
