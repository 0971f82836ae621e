"""Contracts: claims that can be false, their vocabulary, and the rules for hyperparameters."""

from blackswan.contracts.loader import load
from blackswan.contracts.model import Claim, Contract, Domain, Range, Rule, Signature, Source, Tolerance, Vocabulary, contract_digest
from blackswan.contracts.problems import ContractError, Problem
from blackswan.contracts.schema import vocabulary as _vocabulary
from blackswan.contracts.vocabulary import load_checks, load_mutants, load_operations, load_vocabulary

KINDS = _vocabulary("kind")
DTYPES = _vocabulary("dtype")
FLAVOURS = _vocabulary("flavour")

__all__ = [
    "DTYPES",
    "FLAVOURS",
    "KINDS",
    "Claim",
    "Contract",
    "ContractError",
    "Domain",
    "Problem",
    "Range",
    "Rule",
    "Signature",
    "Source",
    "Tolerance",
    "Vocabulary",
    "contract_digest",
    "load",
    "load_checks",
    "load_mutants",
    "load_operations",
    "load_vocabulary",
]
