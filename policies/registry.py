"""Policies by name.

A name is `router[:option=value,...][+admission[:option=value,...]]`: `conductor`, `cache_aware+early`,
`conductor:threshold=3+predictive:threshold=0.95`. Without an admission, `conductor` checks both SLOs as Algorithm 1
does, the other routers accept everything. Anything with a `decide` method is a policy as well: `learned`, which is
shipped, a run folder of `train.py`, a .onnx file exported from one, or `module:Class`. `clairvoyant` knows the future.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.kernel import live as _live
from envs.kernel import memory as _memory
from envs.kernel import replay as _replay
from envs.kernel.compile import entry_point
from envs.simulator import Simulator
from envs.state import Observation

from . import compiled_scorer, early_rejection, peers, routers
from .policy import Policy, PolicyError

if TYPE_CHECKING:
    from .networks import SetScorer


class Option(NamedTuple):
    """A parameter of a router or an admission, with its default.

    It is searched from `low` to `high` (`policies.tuning`) in the given scale, `switch` meaning either of the two, and
    not at all without them: it describes the cluster, or changes no decision. Any value may be given in a name.
    """

    name: str
    default: float
    meaning: str
    low: float | None = None
    high: float | None = None
    scale: Literal["linear", "log", "switch"] = "linear"


class Part(NamedTuple):
    """A router or an admission by name: its compiled function and its options in order of `values`."""

    callback: _replay.Callback
    options: tuple[Option, ...]
    meaning: str


def _router(function: Any, *options: Option) -> Part:
    return Part(_replay.Callback(function, _replay.ROUTER), options, _first_line(function))


def _admission(function: Any, *options: Option) -> Part:
    return Part(_replay.Callback(function, _replay.ADMISSION), options, _first_line(function))


def _first_line(function: Any) -> str:
    return str(function.__doc__).strip().splitlines()[0]


_THRESHOLD = Option("threshold", 1.0, "load above which a request is rejected; 1 is the SLO itself", 0.25, 1.5)

_AIBRIX_GATES = (
    Option("spread", 16.0, "difference in requests at which the least loaded is taken", 1.0, 64.0, "log"),
    Option(
        "sigma", 1.0, "prefills with more requests than mean + this many standard deviations are left out", 0.0, 3.0
    ),
    Option(
        "throughput_spread",
        2048.0,
        "difference in tokens per second at which the slowest decode is taken",
        50.0,
        50000.0,
        "log",
    ),
)

ROUTERS: dict[str, Part] = {
    "random": _router(routers.random),
    "round_robin": _router(routers.round_robin),
    "load_balancing": _router(routers.load_balancing),
    "power_of_two": _router(routers.power_of_two),
    "cache_aware": _router(routers.cache_aware),
    "conductor": _router(
        routers.conductor,
        Option(
            "threshold",
            1.5,
            "kvcache_balancing_threshold: fetch when the best prefix is this much longer",
            1.0,
            16.0,
            "log",
        ),
        Option("min_over_both", 0.0, "1: fetch only where that is predicted to be faster too", 0.0, 1.0, "switch"),
    ),
    "prior": _router(
        compiled_scorer.prior,
        Option("ttft", 1.0, "threshold of the predicted TTFT where all prefills are busy; idle: 1", 0.01, 1.5, "log"),
        Option("tbt", 1.0, "threshold of the predicted TBT for a prompt as long as the contexts in decode", 0.5, 1.5),
        Option("price", 0.0, "by how much that is lower for each e-fold by which a prompt is longer", 0.0, 0.4),
        Option("affinity", 0.0, "cost of an e-fold between a prompt and a decode's contexts, squared", 0.0, 0.2),
    ),
    # the cost functions of other systems
    "lmetric": _router(peers.lmetric),
    "dynamo": _router(
        peers.dynamo,
        Option("load_scale", 1.0, "prefill_load_scale"),
        Option("device_credit", 1.0, "credit per block on the device", 0.0, 2.0),
        Option("host_credit", 0.75, "credit per block in host memory", 0.0, 2.0),
        Option("block_tokens", 512.0, "tokens per block"),
        Option("tokens_per_s", 9000.0, "turns queued seconds into queued tokens", 500.0, 100000.0, "log"),
    ),
    "llmd": _router(
        peers.llmd,
        Option("prefix", 3.0, "weight of the prefix-cache-scorer", 0.0, 10.0),
        Option("queue", 2.0, "weight of the queue-scorer", 0.0, 10.0),
        Option("kv", 2.0, "weight of the kv-cache-utilization-scorer", 0.0, 10.0),
        Option(
            "length_weight", 0.0, "share of the prefix score that goes by the match's length, not its share", 0.0, 1.0
        ),
        Option("longest_tokens", 8192.0, "match that counts as the longest there", 1000.0, 100000.0, "log"),
    ),
    "llmd_latency": _router(
        peers.llmd_latency, Option("most", 0.0, "1: the most headroom to the SLO, not the least", 0.0, 1.0, "switch")
    ),
    "prefix_affinity": _router(
        peers.prefix_affinity,
        Option("threshold", 0.8, "share of the prompt from which an instance is sticky", 0.0, 1.0),
        Option("penalty_s", 18.0, "how much longer a sticky instance's queue may be; 0: any", 0.1, 60.0, "log"),
        Option("tokens_per_s", 15928.0, "turns queued seconds into queued tokens", 500.0, 100000.0, "log"),
        Option("load_tokens", 4194304.0, "tokens at which the token-load-scorer ends"),
    ),
    "aibrix": _router(
        peers.aibrix,
        *_AIBRIX_GATES,
        Option("prefill_ms", 0.0, "milliseconds per queued request; 0: its estimate for 512 tokens", 0.0, 2000.0),
    ),
    "aibrix_prefix": _router(
        peers.aibrix_prefix,
        *_AIBRIX_GATES,
        Option("least_match", 0.0, "percent of the prompt below which a match counts as none", 0.0, 100.0),
        Option("running_weight", 1.0, "weight of requests at a decode instance", 0.0, 2.0),
        Option("throughput_weight", 1.0, "weight of its throughput", 0.0, 2.0),
    ),
    "smg": _router(
        peers.smg,
        Option("cache_threshold", 0.3, "share of the prompt above which the longest match decides", 0.0, 1.0),
        Option(
            "balance_abs", 64.0, "the pool is out of balance when requests differ by more than this", 1.0, 256.0, "log"
        ),
        Option("balance_rel", 1.5, "and by more than this factor", 1.0, 10.0, "log"),
        Option("kv_pressure_s", 0.15, "weight of KV usage k, as k / (1 - k)", 0.0, 2.0),
        Option("tokens_per_s", 2000.0, "throughput of an instance that decodes nothing"),
    ),
    "vllm_router": _router(peers.vllm_router, Option("host_credit", 0.8, "credit of a token in host memory", 0.0, 2.0)),
    "production_stack": _router(
        peers.production_stack, Option("beta", 1.0, "what relative load weighs against the match", 0.02, 20.0, "log")
    ),
}
ADMISSIONS: dict[str, Part] = {
    "none": _admission(early_rejection.accept_all),
    "own": _admission(early_rejection.routers_own),
    "slo": _admission(early_rejection.both_slos, _THRESHOLD),
    "baseline": _admission(early_rejection.baseline, _THRESHOLD),
    "early": _admission(early_rejection.early, _THRESHOLD),
    "predictive": _admission(early_rejection.predictive, _THRESHOLD),
}


LEARNED = Path(__file__).with_name("learned.onnx")
"""The policy called `learned`: see docs/learning.md."""
CLAIRVOYANT = (
    "prior:ttft=0.15,tbt=0.96,price=0.1,affinity=0.015",
    "conductor:threshold=1,min_over_both=1+none",
)
"""The policy that the clairvoyant assumes to go on, and where that would have requests go that it rejects."""
OWN_ADMISSION = {"conductor": "slo", "prior": "own"}
"""The admission of a router whose name says none; others accept everything."""


class CompiledPolicy:
    """A router with an admission, both compiled: runs inside a replay or on any observation.

    Args:
        router: a compiled function with its parameters.
        admission: the same.
        recheck: whether decode nodes check the TBT SLO again.
    """

    def __init__(
        self,
        name: str,
        router: tuple[_replay.Callback, NDArray[np.float64]],
        admission: tuple[_replay.Callback, NDArray[np.float64]],
        recheck: bool,
    ) -> None:
        self.name = name
        self.router, self.router_values = router
        self.admission, self.admission_values = admission
        self.recheck = recheck
        self.memory = np.zeros((1, 4), np.uint64)
        self._observed: tuple[Observation | None, Any] = (None, ())  # the last one, and what the kernel takes for it
        self._choose: Any = None
        self._one: tuple[Observation | None, Any, int] = (None, None, 0)  # as `_observed`, for `decide_one`
        self._choose_one: Any = None

    def reset(self, clusters: int, seed: int) -> None:
        """See `Policy.reset`."""
        self.memory = np.zeros((clusters, 4), np.uint64)
        self.memory[:, 0] = np.random.SeedSequence(seed).generate_state(clusters, np.uint64)
        self._one = (None, None, 0)

    def decide(self, observation: Observation) -> NDArray[np.int64]:
        clusters = len(observation.request)
        if len(self.memory) != clusters:
            raise PolicyError(f"{self.name} was reset for {len(self.memory)} clusters, got observations of {clusters}")
        actions = np.zeros(clusters, np.int64)
        if self._observed[0] is not observation:
            sizes = {"prefills": observation.prefill.shape[1], "decodes": observation.decode.shape[1]}
            headers = _memory.headers(_memory.OBSERVATION, observation, clusters, **sizes)
            parts = (headers, self.router, self.router_values, self.admission, self.admission_values)
            self._observed = (observation, parts)
            self._choose = entry_point(_replay.choose_actions, *parts, self.memory, actions)
        self._choose(*self._observed[1], self.memory, actions)
        return actions

    def decide_one(self, observation: Observation) -> int:
        """The action for the observation of one cluster, as `decide` has it; a source that is no choice of its own
        counts as LOCAL.

        Raises:
            PolicyError: it chose an instance that may not be chosen.
        """
        if self._one[0] is not observation:
            self._one = (observation, *self._choice(observation))
            self._choose_one = entry_point(_live.choose_one, 0)
        action: int = self._choose_one(self._one[2])
        if action < 0:
            raise PolicyError(f"{self.name}: chose an instance that may not be chosen")
        return action

    def _choice(self, observation: Observation) -> tuple[Any, int]:
        """What `live.choose_one` reads (it has to be kept), and its address."""
        sizes = {"prefills": observation.prefill.shape[1], "decodes": observation.decode.shape[1]}
        header = _memory.headers(_memory.OBSERVATION, observation, 1, **sizes)
        choice = np.zeros(1, _live.CHOICE)
        choice["observation"] = header.ctypes.data
        choice["memory"] = self.memory.ctypes.data
        for kind, function, values in (
            ("router", self.router, self.router_values),
            ("admission", self.admission, self.admission_values),
        ):
            choice[kind] = function.__wrapper_address__()
            choice[f"{kind}_values"], choice[f"{kind}_count"] = values.ctypes.data, len(values)
        return (choice, header), choice.ctypes.data

    def replay(
        self, simulator: Simulator, cluster: int = 0, *, limit: int = 1 << 62, until_s: float = math.inf
    ) -> None:
        """Decide for the next requests of a simulated cluster without returning to Python: see `Simulator.replay`."""
        simulator.replay(
            cluster,
            self.router,
            self.router_values,
            self.admission,
            self.admission_values,
            self.memory[min(cluster, len(self.memory) - 1)],
            limit=limit,
            until_s=until_s,
        )

    def branch(
        self, simulator: Simulator, cluster: int, scratch: int, actions: NDArray[np.int64], *, horizon: int
    ) -> NDArray[np.int64]:
        """What becomes of each of some decisions when this policy decides from there on: see `Simulator.branch`."""
        return simulator.branch(
            cluster,
            scratch,
            actions,
            self.router,
            self.router_values,
            self.admission,
            self.admission_values,
            self.memory[min(cluster, len(self.memory) - 1)],
            horizon=horizon,
        )


def compiled_policy(scorer: SetScorer, name: str, recheck: bool, *, rejects: bool = True) -> CompiledPolicy:
    """A set scorer as a compiled policy, with the weights it has now; without `rejects` it takes all it can."""
    values = compiled_scorer.packed(scorer, rejects)
    return CompiledPolicy(name, (_SCORER, values), (ADMISSIONS["own"].callback, np.zeros(0)), recheck)


def gate_of(name: str) -> NDArray[np.float64]:
    """The options of a `prior` by name, as the gate of a set scorer.

    Raises:
        PolicyError: it is no prior.
    """
    policy = make_policy(name)
    if not isinstance(policy, CompiledPolicy) or policy.router is not ROUTERS["prior"].callback:
        raise PolicyError(f"--base {name}: expected prior[:option=value,...], which the network adds to")
    return policy.router_values


_SCORER = _replay.Callback(compiled_scorer.set_scorer, _replay.ROUTER)


def _part(parts: dict[str, Part], kind: str, name: str, given: dict[str, float]) -> tuple[_replay.Callback, Any]:
    if name not in parts:
        raise PolicyError(f"no {kind} is called {name!r}; there are {', '.join(parts)}")
    part = parts[name]
    known = {option.name: option.default for option in part.options}
    for option in given:
        if option not in known:
            options = ", ".join(known) or "none"
            raise PolicyError(f"{kind} {name!r} has no option {option!r}; its options: {options}")
    return part.callback, np.array(list((known | given).values()), np.float64)


def _parse(options: str, whole: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        try:
            if not equals:
                raise ValueError
            values[key] = float(value)
            if not math.isfinite(values[key]):
                raise ValueError
        except ValueError:
            raise PolicyError(f"policy {whole!r}: expected option=number, found {option!r}") from None
    return values


def parse_heuristic(name: str) -> tuple[str, str, dict[str, float], dict[str, float]] | None:
    """Router, admission and the options given of each, as `CompiledPolicy` takes them; None for other policies.

    Raises:
        PolicyError: an option that is no option=number.
    """
    router, plus, admission = name.partition("+")
    router, _, options = router.partition(":")
    if router not in ROUTERS:
        return None
    if not plus:
        admission = OWN_ADMISSION.get(router, "none")
    admission, _, admission_options = admission.partition(":")
    return router, admission, _parse(options, name), _parse(admission_options, name)


def make_policy(name: str) -> Policy:
    """A policy by name, by run folder of `train.py`, by exported .onnx file, or by `module:Class`.

    Raises:
        PolicyError: there is no such policy; the message lists what there is.
    """
    parts = parse_heuristic(name)
    if parts is not None:
        router, admission, router_options, admission_options = parts
        return CompiledPolicy(
            name,
            _part(ROUTERS, "router", router, router_options),
            _part(ADMISSIONS, "admission", admission, admission_options),
            recheck=admission != "none",
        )
    if name == "learned":
        from .artifact import load_artifact

        return load_artifact(LEARNED)
    if name == "clairvoyant":
        from .clairvoyant import Clairvoyant

        return Clairvoyant(name, *map(make_policy, CLAIRVOYANT))  # type: ignore[arg-type]
    if Path(name).is_dir():
        from .run_folder import load_run

        return load_run(Path(name))
    if Path(name).suffix.lower() == ".onnx" or Path(name).is_file():
        from .artifact import load_artifact

        return load_artifact(name)
    module, colon, attribute = name.partition(":")
    if colon and attribute.isidentifier():
        return _imported(name, module, attribute)
    raise PolicyError(
        f"no policy is called {name!r}: expected ROUTER[+ADMISSION] with a router of {', '.join(ROUTERS)} and an "
        f"admission of {', '.join(ADMISSIONS)}; or learned; or a run folder of train.py; or a .onnx file; or "
        "module:Class"
    )


def _imported(name: str, module: str, attribute: str) -> Policy:
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever the module does when it is imported
        raise PolicyError(f"policy {name!r}: cannot import {module!r}: {type(error).__name__}: {error}") from error
    kind = getattr(found, attribute, None)
    if kind is None:
        raise PolicyError(f"policy {name!r}: module {module!r} has no {attribute!r}")
    try:
        made = kind()
    except Exception as error:
        raise PolicyError(f"policy {name!r}: {attribute}() raised {type(error).__name__}: {error}") from error
    if not callable(getattr(made, "decide", None)):
        raise PolicyError(f"policy {name!r}: {attribute} has no decide(observation) method; see policies.Policy")
    return made if isinstance(made, CompiledPolicy) else _Named(made, name)


class _Named:
    """A policy of a user's own class, with what the class leaves out."""

    def __init__(self, policy: Any, name: str) -> None:
        self.policy = policy
        self.name = str(getattr(policy, "name", name))
        self.recheck = bool(getattr(policy, "recheck", True))

    def reset(self, clusters: int, seed: int) -> None:
        if hasattr(self.policy, "reset"):
            self.policy.reset(clusters, seed)

    def decide(self, observation: Observation) -> NDArray[np.int64]:
        return self.policy.decide(observation)  # type: ignore[no-any-return]
