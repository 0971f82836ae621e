"""Contracts: claims that can be false, their vocabulary, and the rules for hyperparameters."""

from blackswan.contracts.loader import load
from blackswan.contracts.model import Claim, Contract, Domain, Range, Rule, Signature, Source, Tolerance, Vocabulary, contract_digest
from blackswan.contracts.problems import ContractError, Problem
from blackswan.contracts.schema import kinds as _kinds
from blackswan.contracts.tables import ACCELERATORS, DTYPES, FLAVOURS
from blackswan.contracts.vocabulary import load_checks, load_mutants, load_operations, load_vocabulary

KINDS = _kinds()

__all__ = [
    "ACCELERATORS",
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
