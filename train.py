"""Train a scheduler for a cluster on a trace; the run folder is then a policy by name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

HELP = """Train a scheduler for a simulated LLM serving cluster.

A step is one decision for one arriving request: reject it, or choose a prefill instance, a decode
instance and where its cached prefix comes from. The reward is goodput: requests that meet their
TTFT and TBT SLOs. What is trained scores instances as a set and starts as a heuristic (Algorithm 1
of Mooncake with early rejection), so a run works on clusters of any size and starts sane.
With --algo cma it is the options of a heuristic, --base: thresholds, weights, factors.

examples:
  python train.py                       built-in workload, a few minutes, then a leaderboard
  python train.py --trace conversation_trace.jsonl --cluster 8p8d --steps 3000000 --out runs/mine
  python train.py --learn both --load 1.2,2.0 --envs 32 --out runs/other
  python train.py --algo bc --base lmetric+early --out runs/clone
  python train.py --init runs/clone --out runs/better      PPO from the weights of another run
  python train.py --algo cma --base conductor+slo --out runs/tuned    a minute, no torch
  python train.py --config mine.yaml --seed 1       a file with the flags as keys; flags override
  python train.py --resume runs/mine                go on after Ctrl-C; --steps N: to N in all
  python train.py --algo rllib --ray auto --env-runners 16     clusters stepped all over a Ray cluster
  python leaderboard.py --policies runs/mine,conductor,conductor+predictive --part test
  tensorboard --logdir runs

algorithms (--algo):
{algorithms}

on a Ray cluster (--ray): every node needs this project at the same version, as a wheel or as a checkout
in the same place, with conductor-gym[rllib]; only this machine needs the trace and the cluster file.
Where the cluster has tokens, Ray wants RAY_AUTH_MODE=token here and the token where it looks for it.

files: config.yaml, metrics.json, tensorboard/, checkpoints/, best.zip (on validation), final.zip

exit codes: 0 done, 2 bad input, 130 stopped by Ctrl-C (saved, can be resumed)
"""


@dataclass(frozen=True)
class Options:
    algo: str = "ppo"
    """How to train; see above."""
    trace: str = "builtin:conversation"
    """Trace file in any public format, or builtin: or mooncake: with conversation, toolagent or synthetic behind it;
    several separated by commas where the algorithm takes them."""
    cluster: str = "8p8d"
    """Cluster: a name such as 8p8d or 5p11d, or a YAML file."""
    steps: int = 1_000_000
    """Decisions in all, rounded up to whole rollouts of envs x n-steps."""
    out: str = ""
    """Run folder to make. Default: runs/ALGO-CLUSTER-TRACE-TIME."""
    part: str = "train"
    """Part of the trace, by time: train (first 60 %), validation, test, all."""
    load: str = "1.4,2.9"
    """Arrival speed, times the trace's own: X, or LOW,HIGH to draw one for every window."""
    capacity: str = ""
    """Instead of --load: times each trace's capacity, the highest speed at which conductor meets 90 %."""
    envs: int = 64
    """Clusters stepped at once."""
    episode_requests: int = 1000
    """Requests per window of the trace."""
    seed: int = 0
    """Same seed, same machine, CPU: same weights."""
    resume: str = ""
    """Run folder to go on with: its options, step count, optimiser and TensorBoard."""
    overwrite: bool = False
    """Replace the run in --out."""
    config: str = ""
    """YAML file of options."""
    checkpoint_every: int = 200_000
    """Steps between checkpoints."""
    eval_every: int = 200_000
    """Steps between evaluations on the validation part."""
    eval_requests: int = 1300
    """Requests per window of these; at the lowest, the middle and the highest load."""
    device: str = "auto"
    """cpu, cuda or auto (CUDA where there is one)."""
    lr: float = 2e-3
    """Learning rate at the start; falls linearly."""
    epochs: int = 1
    """Passes over every rollout: fresh decisions cost less than learning from old ones again."""
    minibatch: int = 1024
    """Decisions per gradient step."""
    clip: float = 0.2
    """PPO's clip range."""
    gamma: float = 0.998
    """Discount per decision, where --horizon-s is 0."""
    gae_lambda: float = 1.0
    """Lambda of generalised advantage estimation."""
    ent: float = 0.0
    """Weight of the entropy bonus."""
    n_steps: int = 256
    """Decisions per cluster and rollout."""
    target_kl: float = 0.02
    """Stop the passes over a rollout when the policy has moved by 1.5 times this KL; 0: never."""
    hidden: int = 32
    """Hidden units of the network."""
    base: str = ""
    """The heuristic to start from: whose options are tuned (cma, rollout), that is cloned (bc), a prior (ppo)."""
    generations: int = 40
    """cma, rollout: generations of CMA-ES."""
    population: int = 0
    """cma, rollout: candidates per generation; 0: 4 + 3 log of the number of options."""
    windows: int = 16
    """cma, rollout: windows of the trace per generation, the same for all its candidates."""
    rounds: int = 1
    """rollout: times that it visits states, tries out their decisions and fits; each follows the one before;
    0: the prior alone."""
    states: int = 24_000
    """rollout: requests whose decisions are tried out in each round."""
    horizon: int = 300
    """rollout: requests that arrive after each decision tried."""
    fit_epochs: int = 20
    """rollout: passes over all that was tried."""
    fit_lr: float = 2e-3
    """rollout: highest learning rate of these."""
    # bc
    dagger: float = 0.5
    """Probability that the learner's decision is carried out, not the teacher's."""
    # ppo: how decisions are credited, what is learned, and from what (policies/trainers/learner.py)
    horizon_s: float = 60.0
    """Time constant of the discount, in simulated seconds; 0: gamma per decision instead."""
    own_credit: bool = True
    """A request's outcome counts in full in its own decision, however much later it settles."""
    group: int = 8
    """Clusters that get the same requests at the same load: their average is the baseline."""
    anchor_kl: float = 0.0
    """Weight of the KL divergence from the heuristic."""
    temperature: float = 1.0
    """Softness of rejecting while training: above 1, more exploration around the heuristic."""
    learn: str = "admission"
    """routing, admission or both; of the other the heuristic's stays."""
    init: str = ""
    """Run folder whose weights to start from."""
    widen: float = 0.0
    """Share of the run over which the range of loads widens from its middle to all of it."""
    prefill_up: str = ""
    """LOW,HIGH: prefill instances that take part, drawn for every window; default: all."""
    decode_up: str = ""
    """The same for decode instances."""
    hardware: str = ""
    """LOW,HIGH: factor on the speed of every instance, drawn for every window."""
    # rllib
    ray: str = ""
    """rllib: a Ray cluster (auto, HOST:PORT or ray://HOST:PORT); default: one made for the run, on this machine."""
    env_runners: int = 0
    """rllib: processes that step clusters, --envs in each; 0: the trainer's own."""


class Algorithm(NamedTuple):
    """How to train: the module of `policies.trainers` of its name, and what has to be installed for it."""

    meaning: str
    needs: tuple[str, ...]
    extra: str = "train"
    anchored: bool | None = False
    """How the scores of the network trained are meant (policies.networks); None: no network, a heuristic's options."""
    base: str = ""
    """The heuristic that it begins with, where --base does not say."""


ALGORITHMS = {
    "ppo": Algorithm(
        "MaskablePPO of sb3-contrib with the set scorer",
        ("torch", "stable_baselines3", "sb3_contrib", "tensorboard"),
    ),
    "rllib": Algorithm(
        "RLlib's PPO with the same network, on this machine or a Ray cluster",
        ("torch", "sb3_contrib", "tensorboard", "ray", "tree"),  # the last comes with ray[rllib] only
        extra="train,rllib",
    ),
    "rollout": Algorithm(
        "try out every decision at visited states, fit a set scorer to what became of them",
        ("torch", "sb3_contrib", "tensorboard"),
        anchored=True,
        base="prior:ttft=0.15,tbt=0.96,price=0.1,affinity=0.015",
    ),
    "cma": Algorithm("CMA-ES on the options of a heuristic", ("cma",), anchored=None, base="conductor+slo"),
    "bc": Algorithm(
        "behaviour cloning of the heuristic --base with the set scorer",
        ("torch", "stable_baselines3", "sb3_contrib"),
        base="conductor:threshold=1,min_over_both=1+slo",
    ),
}

# Errors that are the user's to mend, by name: importing their classes would import the simulator.
BAD_INPUT = ("TraceError", "SpecError", "PolicyError")


class UsageError(ValueError):
    """Input that cannot be; the message is one line."""


def fail(message: str, code: int = 2) -> NoReturn:
    """Leave with one line."""
    print(f"train.py: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


# --- options -----------------------------------------------------------------------------------


def options_from_yaml(file: Path, base: Options) -> Options:
    """Options in a YAML file, on top of `base`.

    Raises:
        UsageError: no such file, an unknown key or a value of the wrong type, by name.
    """
    import yaml

    try:
        given = yaml.safe_load(file.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {file}: cannot be read: {error}") from None
    return options_from_mapping(given, base, str(file))


def options_from_mapping(given: Any, base: Options, where: str) -> Options:
    """Options from a mapping whose keys are the flags, on top of `base`; `UsageError` as above."""
    from pydantic import TypeAdapter, ValidationError

    if not isinstance(given, dict):
        raise UsageError(f"{where}: expected a mapping of options, found {type(given).__name__}")
    values = {str(key).replace("-", "_"): value for key, value in given.items()}
    known = [field.name for field in fields(Options) if field.name not in ("config", "resume")]
    for key in values:
        if key not in known:
            raise UsageError(f"{where}: unknown option {key!r}; known are {', '.join(known)}")
    for name in ("load", "capacity"):
        given_range = values.get(name)
        if isinstance(given_range, (list, tuple)):
            values[name] = ",".join(map(str, given_range))
        elif isinstance(given_range, (int, float)):
            values[name] = str(given_range)
    try:
        return TypeAdapter(Options).validate_python({**asdict(base), **values})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UsageError(f"{where}: option {name!r}: {first['msg']}, found {first['input']!r}") from None


def parse_range(option: str, text: str) -> tuple[float, float]:
    """`X` or `LOW,HIGH` -> the range."""
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(0 < x < float("inf") for x in numbers) or numbers[0] > numbers[-1]:
        raise UsageError(f"--{option} {text!r}: expected X or LOW,HIGH with 0 < LOW <= HIGH")
    return numbers[0], numbers[-1]


def check(options: Options) -> None:
    """Refuse what cannot be.

    Raises:
        UsageError: naming the option.
    """
    if options.algo not in ALGORITHMS:
        raise UsageError(f"--algo {options.algo!r}: unknown; there is {', '.join(ALGORITHMS)}")
    choices = {"part": ("train", "validation", "test", "all"), "device": ("auto", "cpu", "cuda")}
    choices["learn"] = ("routing", "admission", "both")
    for name, allowed in choices.items():
        if getattr(options, name) not in allowed:
            raise UsageError(f"--{name} {getattr(options, name)!r}: expected one of {', '.join(allowed)}")
    whole = "steps envs episode_requests checkpoint_every eval_every eval_requests epochs"
    whole += " minibatch n_steps hidden states horizon fit_epochs generations windows group"
    for name in (*whole.split(), "lr", "clip", "fit_lr", "temperature"):
        if not 0 < getattr(options, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be above 0")
    for name in ("gamma", "gae_lambda"):
        if not 0 < getattr(options, name) <= 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be above 0, at most 1")
    for name in ("ent", "target_kl", "seed", "env_runners", "horizon_s", "anchor_kl", "widen", "rounds"):
        if not 0 <= getattr(options, name) < 2**32:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be 0 or more")
    parse_range("load", options.load)
    if options.capacity:
        parse_range("capacity", options.capacity)
    if options.population < 4 and options.population != 0:
        raise UsageError(f"--population {options.population}: must be 4 or more, or 0")
    if options.algo == "ppo" and options.envs % options.group:
        raise UsageError(f"--group {options.group}: must divide --envs {options.envs}")
    if not 0 <= options.dagger <= 1:
        raise UsageError(f"--dagger {options.dagger}: must be 0 to 1")


def parse(arguments: list[str]) -> Options:
    """Options from the command line: flags over --config over the resumed run over the defaults.

    Raises:
        UsageError, policies.PolicyError: bad values. SystemExit: --help, or no such flags.
    """
    import tyro

    def flags(base: Options) -> Options:
        return tyro.cli(Options, args=arguments, default=base, prog="train.py", description=described)

    lines = [f"  {name:8} {algorithm.meaning}" for name, algorithm in ALGORITHMS.items()]
    described = HELP.format(algorithms="\n".join(lines))
    first = flags(Options())
    base = Options()
    if first.resume:
        from policies.run_folder import read_config

        where = f"{first.resume}/config.yaml"
        stored = read_config(Path(first.resume)).get("options")
        base = options_from_mapping(stored, base, where)
    if first.config:
        base = options_from_yaml(Path(first.config), base)
    options = flags(base)
    check(options)
    options = replace(options, base=options.base or ALGORITHMS[options.algo].base)
    if options.resume and options.hidden != base.hidden:
        raise UsageError(f"--hidden {options.hidden}: the run in {options.resume} has {base.hidden}")
    return options


# --- the run -----------------------------------------------------------------------------------


def make_folder(options: Options) -> Path:
    """The run folder, made if need be.

    Raises:
        UsageError: it exists and is not empty, or cannot be written.
    """
    if options.resume:
        if options.out and Path(options.out).resolve() != Path(options.resume).resolve():
            raise UsageError("--resume goes on in its own folder: leave --out away")
        folder = Path(options.resume)
    else:
        stem = Path(options.trace.split(",")[0]).name.rpartition(":")[2].partition(".")[0]
        cluster = Path(options.cluster).stem
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = Path(options.out or f"runs/{options.algo}-{cluster}-{stem}-{stamp}")
    try:
        if not options.resume and folder.is_dir() and any(folder.iterdir()):
            if not options.overwrite:
                raise UsageError(f"--out {folder} is not empty: give --resume {folder} or --overwrite")
            if not (folder / "config.yaml").is_file():
                raise UsageError(f"--out {folder} is not empty and no run folder: it is left alone")
            shutil.rmtree(folder)
        for part in ("checkpoints", "tensorboard"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("no permission to write")
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be written: {error.strerror or error}") from None
    return folder


def write_config(options: Options, folder: Path, spec: Any, workloads: list[Any]) -> None:
    """`config.yaml`: what `policies.run_folder` and --resume need."""
    from importlib.metadata import version

    import yaml

    from policies import run_folder

    anchored = ALGORITHMS[options.algo].anchored
    network = {"kind": run_folder.NETWORK, "hidden": options.hidden, "anchored": anchored}
    config = {
        "format": run_folder.FORMAT,
        "algo": options.algo,
        "options": {k: v for k, v in asdict(options).items() if k not in ("config", "resume", "out", "overwrite")},
        "recheck": spec.decode_recheck,
        "network": None if anchored is None else network,
        "observation": run_folder.observation_schema(),
        "trained_on": {
            "traces": {w.trace.name: {"sha256": w.trace.checksum, "load": list(w.load)} for w in workloads},
            "cluster": spec.name,
            "cluster_sha256": spec.checksum,
            "prefill": spec.n_prefill,
            "decode": spec.n_decode,
        },
        "versions": {
            name: version(name)
            for name in ("torch", "stable-baselines3", "sb3-contrib", "cma", "ray", "numpy")
            if installed(name.replace("-", "_"))
        },
    }
    if anchored is None:
        resumed = (folder / "config.yaml").is_file()
        config["policy"] = run_folder.read_config(folder)["policy"] if resumed else options.base
    run_folder.write_atomically(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))


def installed(package: str) -> bool:
    """Whether a package is there, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def make_workloads(options: Options, spec: Any) -> list[Any]:
    """The traces to train on, each with its range of speeds.

    Raises:
        UsageError: blocks that are not the cluster's, or a part without requests. traces.TraceError: no such trace.
    """
    from policies.trainers.workload import Workload
    from policies.tuned import capacity
    from traces import load as load_trace

    found = []
    for name in filter(None, options.trace.split(",")):
        trace = load_trace(name)
        if trace.has_blocks and trace.block_tokens != spec.block_tokens:
            raise UsageError(
                f"--trace {name} has blocks of {trace.block_tokens} tokens, {spec.name} "
                f"of {spec.block_tokens}: set block_tokens in the cluster's file, or reblock the trace"
            )
        if (trace if options.part == "all" else getattr(trace.split(), options.part)).n_requests == 0:
            raise UsageError(f"--part {options.part}: no requests of {name} are in it")
        workload = Workload(trace, options.part, parse_range("load", options.load))
        if options.capacity:
            low, high = parse_range("capacity", options.capacity)
            most = capacity(spec, trace)
            workload = workload._replace(load=(low * most, high * most))
        found.append(workload)
    if not found:
        raise UsageError("--trace: expected a trace")
    return found


def check_base(options: Options) -> None:
    """Refuse a heuristic to start from that the algorithm cannot start from, before there is a folder.

    Raises:
        policies.PolicyError: naming it, and what was expected.
    """
    from policies.registry import gate_of, make_policy
    from policies.tuning import Space

    if options.algo == "cma":
        Space(options.base)
    elif options.algo == "bc":
        make_policy(options.base)
    elif options.base:
        gate_of(options.base)


def run(options: Options, leaderboard: bool) -> int:
    """Train, and compare with heuristics if asked; returns the exit code.

    Raises:
        UsageError, traces.TraceError, envs.spec.SpecError, policies.PolicyError: bad input.
    """
    algorithm = ALGORITHMS[options.algo]
    for package in algorithm.needs:
        if not installed(package):
            raise UsageError(
                f"--algo {options.algo} needs {package}, which is not installed: "
                f"pip install 'conductor-gym[{algorithm.extra}]'"
            )
    from envs.spec import load_cluster

    trainer = importlib.import_module(f"policies.trainers.{options.algo}")
    spec = load_cluster(options.cluster)
    workloads = make_workloads(options, spec)
    check_base(options)
    folder = make_folder(options)
    resumed = bool(options.resume)
    if not resumed:
        write_config(options, folder, spec, workloads)
    try:
        finished = trainer.train(options, folder, spec, workloads, resumed)
    except KeyboardInterrupt:
        finished = False
    if resumed:
        write_config(options, folder, spec, workloads)
    if not finished:
        print(f"stopped; go on with: python train.py --resume {folder}", file=sys.stderr)
        return 130
    print(f"saved {folder}")
    if leaderboard:
        compare(options, str(folder))
    else:
        print(f"compare: {' '.join(comparison(options, str(folder)))}")
    return 0


def comparison(options: Options, folder: str) -> list[str]:
    """The leaderboard's command line for the run among heuristics, on the held-out test part."""
    names = "conductor,conductor+early,conductor+predictive,cache_aware+early,load_balancing+early"
    command = [
        "python",
        "leaderboard.py",
        "--policies",
        f"{folder},{names}",
        "--trace",
        options.trace,
    ]
    option = "capacity" if options.capacity else "load"
    low, high = parse_range(option, getattr(options, option))
    return [*command, "--part", "test", "--cluster", options.cluster, f"--{option}", f"{(low + high) / 2:g}"]


def compare(options: Options, folder: str) -> None:
    """Print the leaderboard of the run."""
    command = comparison(options, folder)
    program = Path(__file__).with_name("leaderboard.py")
    if not program.is_file():
        print(f"there is no leaderboard.py here to compare with; its command: {' '.join(command)}")
        return
    subprocess.run([sys.executable, str(program), *command[2:]], check=False)


def main(arguments: list[str]) -> int:
    """Parse, train, compare; returns the exit code."""
    try:
        options = parse(arguments)
        return run(options, leaderboard=not arguments)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, UsageError) or type(error).__name__ in BAD_INPUT:
            fail(str(error))
        raise


if __name__ == "__main__":
    # A shell has what it starts in the background ignore this signal, and Python leaves it at that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
