"""Who decides: routers, admission, learned policies. `make_policy(name)` gives any of them."""

from .policy import Policy, PolicyError
from .registry import ADMISSIONS, ROUTERS, CompiledPolicy, make_policy

__all__ = ["ADMISSIONS", "ROUTERS", "CompiledPolicy", "Policy", "PolicyError", "make_policy"]
